"""The cases of parity: every strategy against one process without any engine, on equal samples.

Each case is one train.py run of 8 steps, or of the 14 of docs/evidence/parity.md, on 67 chats with unevenly masked answers: fp32,
SGD at a rate that moves the loss by more than 10 %, global batch 16, so that an epoch ends in the middle of a batch.
"""

import itertools
from typing import Any

from .runs import GLOBAL_BATCH

TOLERANCE = 1e-5  # relative
WORLD_SIZES = (1, 2, 4)
ACCUMULATIONS = (1, 2, 4)

DDP = ["--ds_config", "none"]
STRATEGIES: dict[str, list[str]] = {
    "ddp": DDP,
    **{
        name: ["--ds_config", f"ds_configs/{name}.json"]
        for name in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_hpz",
                     "zero3_nvme")
    },
    "fsdp2": ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"],
    "hsdp": ["--accelerate_config", "accelerate_configs/hsdp_1x4.yaml"],
}  # fmt: skip
# Optimizers that need whole parameters, under the strategies that keep them whole.
WHOLE_PARAMETER = {
    f"{kind}+{optim}": [*STRATEGIES[kind], "--optim", optim]
    for kind, optim in itertools.product(("ddp", "fsdp2"), ("lamb", "lars"))
}
# Other architectures, tiny and random, under one strategy of each kind: a mixture of experts that keeps buffers in its state
# dict, and a model of images and texts that is given texts alone.
MODELS = ("deepseek_v3", "gemma3")
OTHER_MODELS = {f"{kind}+{model}": STRATEGIES[kind] for kind in ("ddp", "zero3", "fsdp2") for model in MODELS}
LEARNING_RATE = {"sgd": "0.6", "lamb": "0.02", "lars": "7"} | dict.fromkeys(MODELS, "0.1")


def cases(world_size: int, accumulations: tuple[int, ...] = ACCUMULATIONS) -> list[dict[str, Any]]:
    """The cases of one world size: {"name", "strategy", "accumulation", "model", "flags"}."""
    found = []
    every = STRATEGIES | WHOLE_PARAMETER | (OTHER_MODELS if world_size == 2 else {})
    for (strategy, flags), accumulation in itertools.product(every.items(), accumulations):
        if strategy == "hsdp" and world_size != 4:
            continue  # two groups of two: accelerate refuses groups of one
        if "+" in strategy and accumulation != accumulations[0]:
            continue
        micro = GLOBAL_BATCH // world_size // accumulation
        name = f"{strategy}-w{world_size}-k{accumulation}"
        evaluated = ["--per_device_eval_batch_size", str(4 + world_size)]
        found.append(_case(name, world_size, strategy, accumulation, micro, [*flags, *evaluated]))
    return found


def references() -> list[dict[str, Any]]:
    """One process without any engine, once per optimizer and once per model."""
    return [_case(f"single+{of}", 1, f"single+{of}", 1, GLOBAL_BATCH, []) for of in LEARNING_RATE]


def _case(name: str, ranks: int, strategy: str, accumulation: int, micro: int, flags: list[str]) -> dict[str, Any]:
    """What stands behind a strategy's `+` is an optimizer or one of MODELS."""
    of = strategy.partition("+")[2] or "sgd"
    model, optim = (of, "sgd") if of in MODELS else (None, of)
    rate = f"--optim {optim} --learning_rate {LEARNING_RATE[of]} --per_device_train_batch_size {micro}".split()
    about = {"name": name, "ranks": ranks, "strategy": strategy, "accumulation": accumulation, "model": model}
    return about | {"flags": [*flags, *rate]}


def reference_of(strategy: str) -> str:
    return f"single+{strategy.partition('+')[2] or 'sgd'}"


def assert_equal(result: dict[str, Any], reference: dict[str, Any]) -> None:
    """Raise AssertionError where a loss, a gradient's norm or a held-out loss is not the reference's, but for rounding."""
    differences = worst(result, reference)
    assert all(difference <= TOLERANCE for difference in differences.values()), differences


def assert_damage_shows(damaged: dict[str, Any], reference: dict[str, Any]) -> None:
    """Raise AssertionError where gradients of one rank that are 1 % too large would pass for rounding."""
    differences = worst(damaged, reference)
    assert differences["grad_norm"] > 100 * TOLERANCE and differences["loss"] > 3 * TOLERANCE, differences


def worst(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference to the reference, for losses, gradient norms and evaluation losses."""
    differences = {}
    for key in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = result[key], reference[key]
        if len(ours) != len(theirs) or not ours:
            raise ValueError(f"{len(ours)} values of {key}, but the reference has {len(theirs)}")
        differences[key] = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return differences
