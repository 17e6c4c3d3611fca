"""Training on images gives under every strategy the losses of a plain loop that reads one sample at a time."""

import functools

import pytest

from testing import image_rows, marks
from testing import image_runs as images
from testing.image_runs import (
    ADAPTERS,
    CHECKPOINTING,
    DORA,
    EVERYWHERE,
    PACKED,
    QDORA,
    QLORA,
    RSLORA,
    SMALL,
    TILED,
    TOWER,
    Case,
)

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
QUICK = [Case("qwen3_vl", "zero3", 2, TOWER)]
SLOW = [
    Case("gemma3", "fsdp2", 2), Case("smolvlm", "ddp", 2, TOWER), Case("qwen3_vl", "zero3_sp2", 2, TILED),
    *(Case(model, variant=TOWER) for model in images.MODELS),
    *(Case(model, strategy, 2, TOWER) for model, strategy in (
        ("qwen2_5_vl", "fsdp2"), ("internvl", "zero3"), ("gemma4", "zero3"), ("qwen3_vl", "fsdp2"),
    )),
    *(Case("qwen3_vl", variant=variant) for variant in (PACKED, "padded", ADAPTERS)), Case("gemma3", variant=PACKED),
    Case("gemma3", "fsdp2", 3, TOWER), Case("qwen3_vl", "fsdp2", 2, PACKED),
    Case("qwen3_vl", "zero3", 2, "tower trained, checkpointing"), Case("qwen3_vl", "zero3", 2, TILED),
    Case("qwen2_5_vl-even", "zero3_tp2", 2, TOWER), Case("qwen2_5_vl", "ddp_sp2", 2, EVERYWHERE),
    Case("gemma3", "fsdp2_tp2", 4, TOWER), Case("gemma3", "fsdp2", 2, QLORA),
]  # fmt: skip
FURTHER = (TILED, CHECKPOINTING, QLORA)
MATRIX = [
    Case(model, strategy, 3, variant)
    for model in images.MODELS
    for strategy in STRATEGIES
    for variant in (TOWER, *FURTHER)
    if (model, variant) != ("llama4", TILED)  # whose experts are not computed by tiles
]
MATRIX += [
    *(Case(model, strategy, 2, TOWER) for model, strategy in (
        ("llava_onevision", "ddp"), ("mistral3", "fsdp2"), ("qwen3_5", "zero3"), ("gemma3", "zero3"),
    )),
    *(Case("qwen3_vl", variant=variant) for variant in ("sdpa", "eager", RSLORA, DORA)), Case("gemma3", variant="eager"),
    Case("qwen3_vl", "zero2_offload", 2), Case("gemma3", "fsdp2", 2, TILED), Case("qwen3_5", "ddp", 2, TILED),
    Case("internvl", "ddp", 2, QDORA), Case("mistral3", "fsdp2_sp2", 4, TOWER),
    Case("qwen3_vl", "hsdp_sp2", 4, PACKED), Case("qwen3_vl", "zero3", 2, QLORA),
    Case("qwen2_5_vl-even", "ddp_tp2", 2, EVERYWHERE), Case("internvl", "zero1_tp2", 2, TOWER),
]  # fmt: skip
MATRIX += [Case(model, *each, TOWER) for model in images.IN_TENSOR_GROUPS for each in images.TENSOR_GROUPS.items()]
ADAPTED = [
    *(Case("qwen3_vl", strategy, 2, SMALL) for strategy in ("zero3", "fsdp2")),
    Case("qwen3_vl", "zero3", 2, ADAPTERS), Case("gemma3", "fsdp2", 2, EVERYWHERE),
]  # fmt: skip
ADAPTED_MATRIX = [
    Case(model, strategy, 3, variant)
    for model in images.MODELS
    for strategy in STRATEGIES
    for variant in (ADAPTERS, EVERYWHERE)
] + [Case("qwen3_vl", "ddp", 2, SMALL), Case("qwen3_vl", "zero2", 2, SMALL), Case("internvl", "ddp", 2, EVERYWHERE)]


BY_NAME = {str(case): case for case in QUICK + SLOW + MATRIX + ADAPTED + ADAPTED_MATRIX}


def alone(case):
    """One process with the same adapters or optimizer."""
    return Case(case.model, variant=case.variant)


@pytest.fixture(scope="module")
def logs(folder, asked_for):
    """What each case logged that a selected test asks for, and those that adapters are compared with."""
    wanted = [BY_NAME[name] for name in sorted(asked_for("name") | asked_for("adapted"))]
    return images.run_cases(folder, wanted + [alone(BY_NAME[name]) for name in sorted(asked_for("adapted"))])


@pytest.fixture(scope="module")
def plain(folder, logs):
    rows = image_rows.write_rows(folder)

    @functools.cache
    def call(model, variant):
        return images.plain(folder, Case(model, variant=variant), rows)

    return lambda case: call(case.model, images.loop_of(case))


@pytest.mark.parametrize("name", marks.named(QUICK, SLOW, MATRIX))
def test_each_step_is_that_of_one_sample_at_a_time(name, logs, plain):
    case = BY_NAME[name]
    history, loss = plain(case)
    images.assert_equal(case, logs[case], history)
    assert images.held_out(logs[case]) == pytest.approx(loss, rel=images.TOLERANCE)
    assert abs(history[-1]["loss"] - history[0]["loss"]) > 0.02 * history[0]["loss"], "the loss hardly moves"


@pytest.mark.parametrize("adapted", marks.named([], ADAPTED, ADAPTED_MATRIX))
def test_adapters_and_adamw_give_the_losses_of_one_process(adapted, logs):
    case = BY_NAME[adapted]
    history = [entry for entry in logs[alone(case)] if "loss" in entry]
    images.assert_equal(case, logs[case], history)
    assert abs(history[-1]["loss"] - history[0]["loss"]) > 0.02 * history[0]["loss"]
    assert images.held_out(logs[case]) == pytest.approx(images.held_out(logs[alone(case)]), rel=images.TOLERANCE)
