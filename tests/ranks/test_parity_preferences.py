"""Every objective gives under every strategy the losses of a plain loop that shares no code with brigade."""

import functools

import pytest

from testing import marks, plain_preferences, preferences
from testing.preferences import (
    ADAPTERS,
    ADAPTERS_FIRST,
    APART,
    BATCH,
    CONTINUED,
    CONTINUED_NAMED,
    CONTINUED_SECOND,
    DORA,
    EAGER,
    FORMS,
    LOOSER,
    NAMED,
    NAMED_SECOND,
    ONE,
    PACKED,
    QLORA,
    SDPA,
    SECOND,
    STEPS,
    TILED,
    TOLERANCE,
    Case,
)

PLAIN = ("ddp", "zero2", "zero3", "fsdp2")
QUICK = [
    Case("sigmoid", "zero3", 2), Case("orpo", "ddp", 2), Case("reward", "zero2", 2), Case("reward", "zero3_sp2", 2, ONE),
]  # fmt: skip
SLOW = [
    *(Case(form) for form in FORMS),
    *(Case(form, strategy, 2) for form, strategy in (
        ("sigmoid", "zero2"), ("sigmoid", "fsdp2"), ("kto", "zero3"), ("kto", "fsdp2"), ("orpo", "zero3"), ("reward", "fsdp2"),
    )),
    *(Case(form, variant=PACKED) for form in ("sigmoid", "kto", "reward")),
    *(Case("sigmoid", variant=variant) for variant in (TILED, SECOND, NAMED_SECOND)),
    *(Case("sigmoid", strategy, 2, variant) for strategy, variant in (
        ("fsdp2", PACKED), ("zero3", NAMED), ("zero3", NAMED_SECOND), ("fsdp2", NAMED_SECOND), ("fsdp2", SECOND),
    )),
    *(Case("sigmoid", strategy, 2, variant) for strategy, variant in (("zero3", EAGER), ("fsdp2", SDPA), ("ddp", APART))),
    Case("sigmoid", "ddp", 3, NAMED_SECOND),
    Case("kto", "zero3", 2, NAMED_SECOND),
    *(Case(form, strategy, 2) for form, strategy in (
        ("sigmoid", "zero1_pp2"), ("sigmoid", "zero3_sp2"), ("sigmoid", "fsdp2_ep2"), ("kto", "ddp_pp2"), ("kto", "fsdp2_sp2"),
        ("orpo", "zero1_tp2"), ("kto", "zero1_tp2"),
    )),
    *(Case(form, "fsdp2_sp2", 2, ONE) for form in ("sigmoid", "kto", "reward")),
    *(Case("sigmoid", strategy, 4) for strategy in ("hsdp", "fsdp2_tp2")),
]  # fmt: skip
STRATEGIES = ("zero1", "zero2_offload", "zero3_offload", "zero3_offload_param", "ddp_pp2", "zero1_pp2", "ddp_sp2", "zero3_sp2",
              "fsdp2_sp2", "fsdp2_ep2", "zero1_tp2", "zero3_tp2", "ddp_tp2")  # fmt: skip
MATRIX = [
    *(Case(form, strategy, 2) for form in ("sigmoid", "kto", "orpo", "reward") for strategy in PLAIN),
    *(Case(form, strategy, 2) for form in ("sigmoid", "ipo", "kto", "orpo") for strategy in STRATEGIES),
    *(Case(form, strategy, 4) for form in ("sigmoid", "kto", "orpo") for strategy in ("hsdp", "fsdp2_tp2")),
    *(Case(form, strategy, 3) for form in FORMS for strategy in PLAIN),
    *(Case(form, strategy, 2, PACKED) for form in ("sigmoid", "kto") for strategy in ("zero1_pp2", "fsdp2_sp2", "zero3_tp2")),
    *(Case(form, "fsdp2_sp2", 2, variant) for form in ("sigmoid", "kto") for variant in (TILED, SECOND, NAMED_SECOND)),
    *(Case(form, strategy, 3, variant) for form in ("sigmoid", "kto") for strategy in PLAIN
      for variant in (PACKED, TILED, SECOND, NAMED, NAMED_SECOND)),
    *(Case("reward", strategy, 2, PACKED) for strategy in ("zero3", "zero3_sp2", "fsdp2_sp2")),
    *(Case(form, strategy, 2, ONE) for form in FORMS for strategy in ("ddp_sp2", "zero3_sp2", "fsdp2_sp2")),
]  # fmt: skip
ADAPTED = [
    *(Case("sigmoid", variant=variant) for variant in (ADAPTERS, QLORA)),
    *(Case("sigmoid", strategy, 2, variant) for strategy, variant in (
        ("ddp", ADAPTERS), ("zero3", ADAPTERS), ("fsdp2", ADAPTERS_FIRST), ("zero2", DORA), ("fsdp2", QLORA),
        ("zero1_pp2", ADAPTERS),
    )),
    Case("kto", "zero2", 2, ADAPTERS),
    *(Case("sigmoid", variant=variant) for variant in (CONTINUED, CONTINUED_SECOND)),
    *(Case("sigmoid", strategy, 2, variant) for strategy, variant in (
        ("zero3", CONTINUED), ("zero3", CONTINUED_SECOND), ("fsdp2", CONTINUED_SECOND),
    )),
]  # fmt: skip
ADAPTED_MATRIX = [
    *(Case(form, strategy, 2) for form in ("sigmoid", "kto", "orpo", "reward") for strategy in PLAIN),
    *(Case(form, strategy, 3, variant) for form in ("sigmoid", "kto") for strategy in PLAIN
      for variant in (ADAPTERS, ADAPTERS_FIRST, DORA, QLORA, CONTINUED, CONTINUED_SECOND)),
    *(Case("reward", strategy, 3, ADAPTERS) for strategy in PLAIN),
    *(Case("sigmoid", strategy, 2, ADAPTERS) for strategy in ("zero1_tp2", "zero3_tp2", "ddp_pp2", "zero3_sp2", "fsdp2_sp2")),
]  # fmt: skip


BY_NAME = {str(case): case for case in QUICK + SLOW + MATRIX + ADAPTED + ADAPTED_MATRIX}
HALF = Case("sigmoid", "fsdp2", 2, "bf16")


@pytest.fixture(scope="module")
def logs(folder, asked_for):
    """What each case logged that a selected test asks for, and those that adapters are compared with."""
    wanted = [BY_NAME[name] for name in sorted(asked_for("name") | asked_for("adapted"))]
    wanted += [against(BY_NAME[name]) for name in sorted(asked_for("adapted"))]
    return preferences.run_cases(folder, wanted + [HALF] * bool(asked_for("half")))


@pytest.fixture(scope="module")
def plain(folder):
    """plain(case): what the plain loop says of its steps; cases of the same rows, model and reference share it."""

    @functools.cache
    def call(form, model, batch, reference):
        return preferences.plain(
            folder, next(case for case in BY_NAME.values() if what(case) == (form, model, batch, reference))
        )

    def what(case):
        return case.form, case.model, case.variant == PACKED, case.variant in preferences.NAMES_ANOTHER

    return lambda case: call(*what(case))


def against(case):
    """One process with the same adapters; for the model without them, the reference is then computed first. Of adapters that go
    on, the reference is then a merged model."""
    other = {CONTINUED: CONTINUED_NAMED, CONTINUED_SECOND: CONTINUED_NAMED}
    other |= {ADAPTERS: ADAPTERS_FIRST} if case.form != "reward" else {}
    return Case(case.form, variant=other.get(case.variant, case.variant))


@pytest.mark.parametrize("name", marks.named(QUICK, SLOW, MATRIX))
def test_each_step_is_that_of_a_plain_loop(name, logs, plain, folder):
    case = BY_NAME[name]
    differences = preferences.assert_equal(preferences.steps_of(logs[case]), plain(case))
    assert {"loss", "grad_norm", "rewards/chosen", "rewards/rejected"} <= differences.keys()
    assert len({round(step["loss"], 3) for step in plain(case)}) > STEPS // 2, "the loss hardly moves"
    preferences.assert_equal([preferences.held_out_of(logs[case])], [preferences.plain_held_out(folder, case)])


@pytest.mark.parametrize("adapted", marks.named([], ADAPTED, ADAPTED_MATRIX))
def test_adapters_give_the_losses_of_one_process(adapted, logs, folder):
    case = BY_NAME[adapted]
    reference = logs[against(case)]
    preferences.assert_equal(preferences.steps_of(logs[case]), preferences.steps_of(reference))
    losses = [step["loss"] for step in preferences.steps_of(reference)]
    assert abs(losses[-1] - losses[0]) > 0.02 * losses[0]
    held_out = preferences.held_out_of(logs[case])
    preferences.assert_equal([held_out], [preferences.held_out_of(reference)])
    if case.variant in (ADAPTERS, ADAPTERS_FIRST):  # a base in 4 bits is another model
        preferences.assert_equal([held_out], [preferences.plain_held_out(folder, case)])


@pytest.mark.slow
@pytest.mark.cases(half="bf16")
def test_a_step_in_bf16_is_nearly_that_of_fp32(logs, folder):
    differences = preferences.worst(preferences.steps_of(logs[HALF]), preferences.plain(folder, HALF))
    assert TOLERANCE < differences["loss"] < 2e-2 and differences["grad_norm"] < 5e-2


# ---- errors that are planted in the plain loop ---------------------------------------------------------------------------
def differences_with(logs, folder, case, **keys):
    return preferences.worst(preferences.steps_of(logs[case]), preferences.plain(folder, case, **keys))


@pytest.mark.cases(name="sigmoid, zero3 on 2")
def test_a_beta_one_percent_off_is_caught(logs, folder):
    differences = differences_with(logs, folder, QUICK[0], beta=0.101)
    assert differences["grad_norm"] > 100 * TOLERANCE and differences["loss"] > 10 * TOLERANCE


@pytest.mark.cases(name="sigmoid, zero3 on 2")
def test_a_pair_the_wrong_way_round_is_caught(logs, folder):
    rows, _ = preferences.rows_of("sigmoid")
    at = next(plain_preferences.steps(len(rows), plain_preferences.Keys(global_batch_size=BATCH)))[0]
    rows[at] |= {"chosen": rows[at]["rejected"], "rejected": rows[at]["chosen"]}
    differences = differences_with(logs, folder, QUICK[0], rows=rows)
    assert differences["grad_norm"] > 100 * TOLERANCE and differences["logps/chosen"] > 100 * TOLERANCE


@pytest.mark.cases(name="sigmoid, zero3 on 2")
def test_one_answers_reference_one_percent_off_is_caught(logs, folder, monkeypatch):
    sound = plain_preferences.Comparison._reference

    def off(self, sample):
        return sound(self, sample) * (1.01 if sample == self.samples[0][0] else 1)

    monkeypatch.setattr(plain_preferences.Comparison, "_reference", off)
    differences = differences_with(logs, folder, QUICK[0])
    assert differences["loss"] > 100 * TOLERANCE and differences["rewards/chosen"] > 10 * LOOSER["rewards/chosen"]


@pytest.mark.slow
@pytest.mark.cases(name="kto, fsdp2 on 2")
def test_answers_to_other_prompts_of_the_wrong_rows_are_caught(logs, folder, monkeypatch):
    sound = plain_preferences.mismatched
    monkeypatch.setattr(plain_preferences, "mismatched", lambda *given: [*sound(*given)[1:], sound(*given)[0]])
    differences = differences_with(logs, folder, Case("kto", "fsdp2", 2))
    assert differences["kl"] > 100 * LOOSER["kl"] and differences["loss"] > 100 * TOLERANCE
