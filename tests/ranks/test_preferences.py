"""Every objective gives under every strategy the losses of a plain loop that shares no code with brigade."""

import pytest

from testing import marks, plain_preferences, preferences
from testing.preferences import (
    ADAPTERS,
    ADAPTERS_FIRST,
    BATCH,
    DORA,
    FORMS,
    LOOSER,
    NAMED,
    NAMED_SECOND,
    PACKED,
    QLORA,
    SECOND,
    STEPS,
    TILED,
    TOLERANCE,
    Case,
)

PLAIN = ("ddp", "zero2", "zero3", "fsdp2")
QUICK = [Case("sigmoid", "zero3", 3), Case("kto", "fsdp2", 3), Case("orpo", "ddp", 3), Case("reward", "zero2", 3)]
SLOW = [
    *(Case(form) for form in FORMS),
    *(Case(form, strategy, 3) for form in ("sigmoid", "kto", "orpo", "reward") for strategy in PLAIN),
    # Packed, an epoch's rows are one step; all other ranks have filler.
    *(Case(form, variant=PACKED) for form in ("sigmoid", "kto", "reward")),
    *(Case("sigmoid", variant=variant) for variant in (TILED, SECOND, NAMED, NAMED_SECOND)),
    *(Case(form, "fsdp2", 3, variant) for form, variant in (("sigmoid", PACKED), ("kto", TILED))),
    *(Case("sigmoid", strategy, 3, variant) for strategy in PLAIN for variant in (SECOND, NAMED_SECOND) if strategy != "zero2"),
    *(Case("sigmoid", strategy, 3, NAMED) for strategy in ("zero3", "fsdp2")),
    Case("kto", "zero3", 3, NAMED_SECOND),
    # Each axis, and offloaded states.
    *(Case(form, strategy, 2) for form, strategy in (
        ("sigmoid", "zero1_pp2"), ("kto", "ddp_pp2"), ("orpo", "zero1_pp2"), ("sigmoid", "zero3_sp2"), ("kto", "fsdp2_sp2"),
        ("orpo", "fsdp2_sp2"), ("sigmoid", "fsdp2_ep2"), ("kto", "fsdp2_ep2"), ("orpo", "fsdp2_ep2"), ("reward", "zero3_sp2"),
        ("sigmoid", "zero3_offload"), ("sigmoid", "zero1_tp2"), ("kto", "zero1_tp2"), ("orpo", "zero1_tp2"),
    )),
    *(Case("sigmoid", strategy, 4) for strategy in ("hsdp", "fsdp2_tp2")),
]  # fmt: skip
STRATEGIES = ("zero1", "zero2_offload", "zero3_offload", "zero3_offload_param", "ddp_pp2", "zero1_pp2", "ddp_sp2", "zero3_sp2",
              "fsdp2_sp2", "fsdp2_ep2", "zero1_tp2", "zero3_tp2", "ddp_tp2")  # fmt: skip
MATRIX = [
    *(Case(form, strategy, 2) for form in ("sigmoid", "ipo", "kto", "orpo") for strategy in STRATEGIES),
    *(Case(form, strategy, 4) for form in ("sigmoid", "kto", "orpo") for strategy in ("hsdp", "fsdp2_tp2")),
    *(Case(form, strategy, 3) for form in FORMS for strategy in PLAIN),
    *(Case(form, strategy, 2, PACKED) for form in ("sigmoid", "kto") for strategy in ("zero1_pp2", "fsdp2_sp2", "zero3_tp2")),
    *(Case(form, "fsdp2_sp2", 2, variant) for form in ("sigmoid", "kto") for variant in (TILED, SECOND, NAMED_SECOND)),
    *(Case("kto", strategy, 3, variant) for strategy in PLAIN for variant in (TILED, SECOND, NAMED, NAMED_SECOND)),
    *(Case("reward", strategy, 2, PACKED) for strategy in ("zero3", "zero3_sp2", "fsdp2_sp2")),
]  # fmt: skip
ADAPTED_QUICK = [Case("sigmoid", "zero3", 3, ADAPTERS)]
ADAPTED = [
    *(Case("sigmoid", "single", 1, variant) for variant in (ADAPTERS, QLORA)),
    *(Case("sigmoid", "fsdp2", 3, variant) for variant in (ADAPTERS, ADAPTERS_FIRST, DORA, QLORA)),
    *(Case("sigmoid", strategy, 3, ADAPTERS) for strategy in ("ddp", "zero3")),
    Case("sigmoid", "zero3", 3, QLORA),
    Case("kto", "zero2", 3, ADAPTERS),
    *(Case("sigmoid", strategy, 2, ADAPTERS) for strategy in ("zero1_pp2", "fsdp2_sp2")),
]
ADAPTED_MATRIX = [
    *(Case(form, strategy, 3, variant) for form in ("sigmoid", "kto", "reward") for strategy in PLAIN
      for variant in (ADAPTERS, ADAPTERS_FIRST) if form != "reward" or variant == ADAPTERS),
    *(Case("sigmoid", strategy, 2, ADAPTERS) for strategy in ("zero1_tp2", "zero3_tp2", "ddp_pp2", "zero3_sp2")),
]  # fmt: skip


def tiers(quick, slow, matrix):
    """Cases by their names, which are the tests' ids."""
    names = [dict.fromkeys(map(str, each)) for each in (quick, slow, matrix)]
    return marks.cases(*names[0], slow=[name for name in names[1] if name not in names[0]], matrix=names[2])


BY_NAME = {str(case): case for case in QUICK + SLOW + MATRIX + ADAPTED_QUICK + ADAPTED + ADAPTED_MATRIX}
HALF = Case("sigmoid", "fsdp2", 3, "bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def logs(folder, asked_for):
    """What each case logged that a selected test asks for, and those that adapters are compared with."""
    wanted = [BY_NAME[name] for name in sorted(asked_for("name") | asked_for("adapted"))]
    wanted += [against(BY_NAME[name]) for name in sorted(asked_for("adapted"))]
    return preferences.run_cases(folder, wanted + [HALF] * bool(asked_for("half")))


def against(case):
    """One process with the same adapters; for the model without them, the reference is then computed first."""
    return Case(
        case.form, variant=ADAPTERS_FIRST if case.variant == ADAPTERS and case.form != "reward" else case.variant
    )


@pytest.mark.parametrize("name", tiers(QUICK, SLOW, MATRIX))
def test_each_step_is_that_of_a_plain_loop(name, logs, folder):
    case = BY_NAME[name]
    steps, plain = preferences.steps_of(logs[case]), preferences.plain(folder, case)
    differences = preferences.worst(steps, plain)
    assert {"loss", "grad_norm", "rewards/chosen", "rewards/rejected"} <= differences.keys()
    assert preferences.is_equal(differences), differences
    assert len({round(step["loss"], 3) for step in plain}) > STEPS // 2, "the loss hardly moves"
    held_out = [preferences.held_out_of(logs[case])], [preferences.plain_held_out(folder, case)]
    differences = preferences.worst(*held_out)
    assert preferences.is_equal(differences), differences


@pytest.mark.parametrize("adapted", tiers(ADAPTED_QUICK, ADAPTED, ADAPTED_MATRIX))
def test_adapters_give_the_losses_of_one_process(adapted, logs, folder):
    case = BY_NAME[adapted]
    reference = logs[against(case)]
    differences = preferences.worst(preferences.steps_of(logs[case]), preferences.steps_of(reference))
    assert preferences.is_equal(differences), differences
    losses = [step["loss"] for step in preferences.steps_of(reference)]
    assert abs(losses[-1] - losses[0]) > 0.02 * losses[0]
    held_out = preferences.held_out_of(logs[case])
    differences = preferences.worst([held_out], [preferences.held_out_of(reference)])
    assert preferences.is_equal(differences), differences
    if case.variant in (ADAPTERS, ADAPTERS_FIRST):  # a base in 4 bits is another model
        differences = preferences.worst([held_out], [preferences.plain_held_out(folder, case)])
        assert preferences.is_equal(differences), differences


@pytest.mark.slow
@pytest.mark.cases(half="bf16")
def test_a_step_in_bf16_is_nearly_that_of_fp32(logs, folder):
    differences = preferences.worst(preferences.steps_of(logs[HALF]), preferences.plain(folder, HALF))
    assert TOLERANCE < differences["loss"] < 2e-2 and differences["grad_norm"] < 5e-2


# ---- errors that are planted in the plain loop ---------------------------------------------------------------------------
def differences_with(logs, folder, case, **keys):
    return preferences.worst(preferences.steps_of(logs[case]), preferences.plain(folder, case, **keys))


@pytest.mark.cases(name="sigmoid, zero3 on 3")
def test_a_beta_one_percent_off_is_caught(logs, folder):
    differences = differences_with(logs, folder, QUICK[0], beta=0.101)
    assert differences["grad_norm"] > 100 * TOLERANCE and differences["loss"] > 10 * TOLERANCE


@pytest.mark.cases(name="sigmoid, zero3 on 3")
def test_a_pair_the_wrong_way_round_is_caught(logs, folder):
    rows, _ = preferences.rows_of("sigmoid")
    at = next(plain_preferences.steps(len(rows), plain_preferences.Keys(global_batch_size=BATCH)))[0]
    rows[at] |= {"chosen": rows[at]["rejected"], "rejected": rows[at]["chosen"]}
    differences = differences_with(logs, folder, QUICK[0], rows=rows)
    assert differences["grad_norm"] > 100 * TOLERANCE and differences["logps/chosen"] > 100 * TOLERANCE


@pytest.mark.cases(name="sigmoid, zero3 on 3")
def test_one_answers_reference_one_percent_off_is_caught(logs, folder, monkeypatch):
    sound = plain_preferences.Comparison._reference

    def off(self, sample):
        return sound(self, sample) * (1.01 if sample == self.samples[0][0] else 1)

    monkeypatch.setattr(plain_preferences.Comparison, "_reference", off)
    differences = differences_with(logs, folder, QUICK[0])
    assert differences["loss"] > 100 * TOLERANCE and differences["rewards/chosen"] > 10 * LOOSER["rewards/chosen"]


@pytest.mark.cases(name="kto, fsdp2 on 3")
def test_answers_to_other_prompts_of_the_wrong_rows_are_caught(logs, folder, monkeypatch):
    sound = plain_preferences.mismatched
    monkeypatch.setattr(plain_preferences, "mismatched", lambda *given: [*sound(*given)[1:], sound(*given)[0]])
    differences = differences_with(logs, folder, QUICK[1])
    assert differences["kl"] > 100 * LOOSER["kl"] and differences["loss"] > 100 * TOLERANCE
