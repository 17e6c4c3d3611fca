"""Expert parallelism prints the losses, gradient norms and held-out losses of one process, and continues what others wrote."""

import pytest

from testing import axes_experts, marks, parity, runs

ALL = {axes_experts.name_of(*case): case for case in axes_experts.PARITY}
# In `make test`: the first, adapters on experts, and the first of stages.
ONCE = set(list(ALL)[:1]) | {
    "qwen3_moe, LoRA on experts, 2 ranks, fsdp2, accumulation 2",
    "mixtral, full, 4 ranks, zero1 x pipeline 2 x expert 2, accumulation 1",
}
# Every model and method once, on four ranks where it has such a case; and every strategy.
OFTEN = {case[:2]: case for case in sorted(axes_experts.PARITY, key=lambda case: case[2])}.values()
OFTEN = [*OFTEN, *{axes_experts.said(case[3]): case for case in axes_experts.PARITY}.values()]
# A pipeline's other schedules: test_parity_pipeline.py has them, and experts know nothing of them.
OFTEN = [case for case in OFTEN if not axes_experts.said(case[3]).endswith(("gpipe", "interleavedzerobubble", "zbv"))]
CHEAPEST, DAMAGED = axes_experts.PARITY[0], "damaged"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def wanted(asked_for):
    names = asked_for("name")
    return {name: case for name, case in ALL.items() if name in names or (DAMAGED in names and case == CHEAPEST)}


@pytest.fixture(scope="module")
def reference(folder, wanted):
    pairs = dict.fromkeys((model, method) for model, method, *_ in wanted.values())
    cases = {pair: axes_experts.reference_of(*pair) for pair in pairs}
    found = runs.run_cases(1, list(cases.values()), folder)
    return {pair: found[case["name"]] for pair, case in cases.items()}


@pytest.fixture(scope="module")
def results(folder, wanted, asked_for):
    found = {}
    for ranks in (2, 4):
        cases = [axes_experts.case(*case) for case in wanted.values() if case[2] == ranks]
        if ranks == 2 and DAMAGED in asked_for("name"):
            cases.append(axes_experts.case(*CHEAPEST) | {"name": DAMAGED, "damage": True})
        if cases:
            found |= runs.run_cases(ranks, cases, folder)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks.size(name in ONCE, ALL[name] in OFTEN)) for name in ALL]
)
def test_experts_over_ranks_equal_one_process(name, reference, results):
    model, method, *_ = ALL[name]
    of = reference[model, method]
    assert of["loss"][-1] < 0.99 * of["loss"][0]
    differences = parity.worst(results[name], of)
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
    # A token may stand between two experts.
    assert results[name]["expert_balance"] == pytest.approx(of["expert_balance"], rel=1e-2)


@pytest.mark.cases(name=DAMAGED)
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(reference, results):
    differences = parity.worst(results[DAMAGED], reference[CHEAPEST[:2]])
    assert differences["grad_norm"] > 100 * parity.TOLERANCE
