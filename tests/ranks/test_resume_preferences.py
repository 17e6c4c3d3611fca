"""A run of preferences that died goes on bit for bit; under another strategy with the losses of the undisturbed run."""

import pytest

from testing import marks, preferences, resume_rows
from testing.preferences import ADAPTERS, Case

EXACT = {
    str(case): case
    for case in [
        Case("sigmoid"),
        *(Case("sigmoid", "zero3", 2, variant) for variant in ("", ADAPTERS)),
        *(Case("kto", strategy, 2) for strategy in ("fsdp2", "zero2", "zero1_pp2")),
        *(Case("reward", strategy, 2) for strategy in ("zero2", "zero3", "fsdp2")),
        *(Case("sigmoid", strategy, 2, ADAPTERS) for strategy in ("ddp", "fsdp2")),
    ]
}
# The other side has an empty cache: it computes its reference again, from the weights at the start. A pipeline, beside which no
# second model stands, gets the first side's.
DIVIDED = ("zero1_pp2",)
RESHARDED = {
    f"{before} to {after.strategy} on {after.ranks}": (before, after)
    for before, after in [
        (Case("sigmoid", "zero3", 2), Case("sigmoid", "fsdp2", 2)),
        (Case("sigmoid", "ddp", 2), Case("sigmoid")),
        (Case("sigmoid", "ddp", 2, ADAPTERS), Case("sigmoid", "zero3", 2, ADAPTERS)),
        (Case("reward", "zero2", 2), Case("reward", "fsdp2", 2)),
        (Case("kto", "fsdp2", 2), Case("kto", "zero3", 2)),
        (Case("kto", "zero3", 2), Case("kto", "zero1_pp2", 2)),
        (Case("reward", "zero3", 2), Case("reward")),
        (Case("sigmoid", "zero1_pp2", 2), Case("sigmoid", "zero2", 3)),
        (Case("sigmoid", "fsdp2", 2, ADAPTERS), Case("sigmoid", "ddp", 3, ADAPTERS)),
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return preferences.write_inputs(tmp_path_factory.mktemp("resumed"))


@pytest.fixture(scope="module")
def exact(folder, asked_for):
    return resume_rows.exact({name: EXACT[name] for name in sorted(asked_for("name"))}, folder)


@pytest.mark.parametrize(
    "name", marks.cases(slow=["sigmoid, single on 1", "sigmoid, zero3 on 2", "sigmoid, zero3 on 2, LoRA"], matrix=EXACT)
)
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, exact, folder):
    logs = [exact[name, which] for which in ("whole", "stopped")]
    for key in preferences.FIGURES:
        for of_log in (preferences.steps_of, lambda log: [entry for entry in log if "eval_loss" in entry]):
            undisturbed, stopped = ([entry.get(key, entry.get(f"eval_{key}")) for entry in of_log(log)] for log in logs)
            assert stopped == undisturbed and len(undisturbed) > 2, key
    resume_rows.assert_same_files(name, folder)


@pytest.fixture(scope="module")
def resharded(folder, asked_for):
    return resume_rows.resharded([RESHARDED[change] for change in sorted(asked_for("change"))], folder, DIVIDED)


@pytest.mark.parametrize("change", marks.cases(slow=list(RESHARDED)[:4], matrix=RESHARDED))
def test_another_strategy_has_the_losses_of_the_undisturbed_run(change, resharded):
    before, after = RESHARDED[change]
    undisturbed, further = (preferences.steps_of(log) for log in (resharded[0][before], resharded[1][before, after]))
    preferences.assert_equal(further[resume_rows.SAVED :], undisturbed[resume_rows.SAVED :])
    held_out = [[preferences.held_out_of(log)] for log in (resharded[1][before, after], resharded[0][before])]
    preferences.assert_equal(*held_out)
    assert undisturbed[-1]["loss"] != pytest.approx(undisturbed[0]["loss"], rel=0.02)
