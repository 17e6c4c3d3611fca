"""Expert parallelism prints the losses, gradient norms and held-out losses of one process, and continues what others wrote."""

import pytest
import torch

from testing import axes_experts, marks, parity, runs

ALL = {axes_experts.name_of(*case): case for case in axes_experts.PARITY}
CHEAPEST, DAMAGED = axes_experts.PARITY[0], "damaged"


@pytest.fixture(scope="module")
def results(folder, asked_for):
    """By name, also of the single process that each case is compared with."""
    names = asked_for("name")
    chosen = [ALL[name] for name in ALL if name in names] + [CHEAPEST] * (DAMAGED in names)
    pairs = dict.fromkeys((model, method) for model, method, *_ in chosen)
    pairs |= dict.fromkeys((model, "full") for model, method in pairs if method == "router bias")
    cases = [axes_experts.reference_of(*pair) for pair in pairs]
    cases += [axes_experts.case(*case) for case in chosen]
    if DAMAGED in names:
        cases.append(axes_experts.case(*CHEAPEST) | {"name": DAMAGED, "damage": True})
    return runs.run_each(cases, folder)


def alone(results, model, method):
    return results[axes_experts.reference_of(model, method)["name"]]


@pytest.mark.parametrize("name", marks.cases(
    axes_experts.name_of(*CHEAPEST),
    "qwen3_moe, LoRA on experts, 2 ranks, fsdp2, accumulation 2",
    "mixtral, full, 4 ranks, zero1 x pipeline 2 x expert 2, accumulation 1",
    "qwen3_moe, router loss, 2 ranks, fsdp2 x expert 2, accumulation 2",
    "minimax_m2, router bias, 2 ranks, zero3, accumulation 2",
    # Each model, each method and each axis beside experts.
    slow=[
        "qwen3_moe, LoRA on experts, 2 ranks, zero3, accumulation 2",
        "gpt_oss, LoRA on experts, 2 ranks, fsdp2 x expert 2, accumulation 1",
        "mixtral, full, 4 ranks, hsdp x expert 4, accumulation 1",
        "qwen3_moe, QLoRA on experts, 4 ranks, ddp x expert 2, accumulation 2",
        "qwen3_moe-wide, QLoRA on experts, 4 ranks, fsdp2 x tensor 2 x expert 2, accumulation 2",
        "qwen3_moe, packing, 4 ranks, fsdp2 x sequence 2 x expert 2, accumulation 2",
        "qwen3_moe, full, 4 ranks, zero1 x tensor 2 x pipeline 2 x expert 2, accumulation 2",
        "qwen3_moe, router loss, 2 ranks, zero3, accumulation 2",
        "qwen3_moe, router loss, 2 ranks, fsdp2 x sequence 2 x expert 2, accumulation 2",
        "qwen3_moe, router loss, 2 ranks, fsdp2 x tensor 2 x expert 2, accumulation 2",
        "qwen3_moe, router loss, packing, checkpointing, 2 ranks, ddp, accumulation 2",
        "qwen3_moe, router loss, LoRA on experts, 2 ranks, ddp, accumulation 2",
        "minimax_m2, router bias, 2 ranks, fsdp2, accumulation 2",
        "minimax_m2, router bias, 2 ranks, fsdp2 x tensor 2 x expert 2, accumulation 2",
        "minimax_m2, router bias, 2 ranks, fsdp2 x sequence 2 x expert 2, accumulation 2",
        "minimax_m2, router bias, packing, checkpointing, 2 ranks, ddp, accumulation 2",
        "deepseek_v3-spread, router bias, 2 ranks, fsdp2 x expert 2, accumulation 2",
        "ernie4_5_moe, router bias, 2 ranks, zero2, accumulation 2",
    ],
    matrix=ALL,
))  # fmt: skip
def test_experts_over_ranks_equal_one_process(name, folder, results):
    model, method, *_ = ALL[name]
    of = alone(results, model, method)
    assert of["loss"][-1] < 0.99 * of["loss"][0]
    parity.assert_equal(results[name], of)
    # A token may stand between two experts.
    assert results[name]["expert_balance"] == pytest.approx(of["expert_balance"], rel=1e-6)
    if method.startswith("router bias"):
        ours, theirs = (
            axes_experts.biases_of(case, folder)
            for case in (axes_experts.case(*ALL[name]), axes_experts.reference_of(model, method))
        )
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    if method == "router bias":  # without its update, losses are others
        assert parity.worst(alone(results, model, "full"), of)["loss"] > 20 * parity.TOLERANCE


@pytest.mark.cases(name=DAMAGED)
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(results):
    differences = parity.worst(results[DAMAGED], alone(results, *CHEAPEST[:2]))
    assert differences["grad_norm"] > 100 * parity.TOLERANCE
