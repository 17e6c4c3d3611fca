"""Liger's norms, rotary embedding and gated MLPs compute what the model's own do, under every strategy and axis.

By testing/pretended_liger.py: the package itself with TRITON_INTERPRET=1, where it and Triton are installed, or a stand-in.
"""

import pytest

from brigade.train.strategy.axes import Axes
from testing import axes, marks, parity, runs

PLAIN = ["--optim", "sgd", "--learning_rate", "0.3", "--max_steps", "4"]
TILED = ["--tiled_loss", "24", "--tiled_mlp", "24"]
LORA = ["--use_peft", "--learning_rate", "3", "--max_steps", "4", "--optim", "sgd"]
WAYS = {
    **{name: parity.STRATEGIES[name] for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")},
    "zero3 tiled": [*parity.STRATEGIES["zero3"], *TILED],
    "fsdp2 recomputing": [*parity.STRATEGIES["fsdp2"], "--activation_checkpointing"],
    "fsdp2 selective": [*parity.STRATEGIES["fsdp2"], "--activation_checkpointing", "selective"],
    "fsdp2 weighted": [*parity.STRATEGIES["fsdp2"], "--label_smoothing_factor", "0.1", "--z_loss_coef", "0.001"],
    "tensor": axes.flags(Axes(tensor=2), "fsdp2"),
    "tensor zero1": axes.flags(Axes(tensor=2), "zero1"),
    "tensor ddp": axes.flags(Axes(tensor=2), "ddp"),
    "sequence": axes.flags(Axes(sequence=2), "zero3"),
    "pipeline": axes.flags(Axes(stages=2), "ddp"),
    "experts": axes.flags(Axes(experts=2), "fsdp2"),
    "lora zero3": parity.STRATEGIES["zero3"],
    "lora fsdp2": parity.STRATEGIES["fsdp2"],
}
KERNELS = {"norm", "gated", "rotary"}


def case(name, ranks, *flags):
    terms = LORA if name.startswith("lora") else PLAIN
    micro = runs.GLOBAL_BATCH // ranks // ranks  # two micro-batches a step
    about = {"name": name, "ranks": ranks, "flags": [*flags, *terms, "--per_device_train_batch_size", str(micro)]}
    # DeepSpeed keeps a process's tensor group.
    about |= {"group": "liger, a group of DeepSpeed" if name == "tensor zero1" else "liger"} if ranks > 1 else {}
    return about | ({"model": "qwen3_moe"} if "experts" in name else {})


ONE = {name: case(name, 1) for name in ("one", "lora one", "experts one")}
ONE["weighted one"] = case("weighted one", 1, *WAYS["fsdp2 weighted"][-4:])
TWO = {name: case(name, 2, *flags, "--use_liger_kernel") for name, flags in WAYS.items()}


def reference_of(name):
    return next((f"{of} one" for of in ("lora", "experts", "weighted") if of in name), "one")


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    names = sorted(asked_for("name"))
    wanted = [ONE[reference_of(name)] for name in names] + [TWO[name] for name in names]
    return runs.run_each(wanted, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", marks.cases("zero3 tiled", "fsdp2", "tensor", "pipeline", matrix=TWO))
def test_fused_kernels_compute_what_plain_ones_do(name, results):
    parity.assert_equal(results[name], results[reference_of(name)])
    assert set(results[name]["fused"]) == (KERNELS - {"gated"} if name == "experts" else KERNELS)
    assert "fused" not in results[reference_of(name)]
