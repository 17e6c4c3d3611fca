"""Compressed gradients on two ranks: near to uncompressed ones, with accumulation, and the same after a resume."""

import pytest

from testing import marks, parity, runs

HOOKS = ("fp16", "bf16", "power_sgd")
ACCUMULATIONS = marks.cases(slow=[4], matrix=[1])


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """DDP with every hook at each accumulation that is asked for, one process group for all."""
    cases = []
    for case in parity.cases(2, tuple(asked_for("accumulation"))):
        if case["strategy"] == "ddp":
            for hook in ("none", *HOOKS):
                flags = [*case["flags"], "--ddp_comm_hook", hook]
                cases.append(case | {"name": f"{hook}-{case['accumulation']}", "flags": flags})
    return runs.run_cases(2, cases, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_half_precision_stays_near(results, hook, tolerance, accumulation):
    plain, compressed = results[f"none-{accumulation}"], results[f"{hook}-{accumulation}"]
    differences = parity.worst(compressed, plain)
    assert 1e-7 < differences["grad_norm"] < tolerance, "compressed, and not by much"
    assert differences["loss"] < tolerance and differences["eval_loss"] < tolerance


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_power_sgd_learns(results, accumulation):
    plain, compressed = results[f"none-{accumulation}"]["loss"], results[f"power_sgd-{accumulation}"]["loss"]
    assert compressed[:3] == plain[:3], "two steps are plain, and the third has their weights"
    assert compressed[3] != plain[3]
    assert plain[0] - compressed[-1] > 0.8 * (plain[0] - plain[-1])


@pytest.mark.matrix
@pytest.mark.cases(accumulation=1)
@pytest.mark.cases(accumulation=4)
def test_accumulation_does_not_change_what_is_compressed(results):
    """The hook sees a step's whole gradient, not each micro-batch's."""
    for hook in HOOKS:
        one, four = (results[f"{hook}-{accumulation}"] for accumulation in (1, 4))
        assert parity.worst(four, one)["loss"] < (1e-4 if hook == "power_sgd" else 1e-3), hook
