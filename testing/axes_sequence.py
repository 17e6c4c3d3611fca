"""The cases of parity of sequence parallelism: rows in parts under every strategy, against one process (testing/parity.py)."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from . import parity
from .ranks import REPOSITORY
from .runs import GLOBAL_BATCH


def strategy(kind: str, size: int, world_size: int) -> list[str]:
    """The flags of a strategy with rows over `size` ranks."""
    if kind.startswith("zero"):
        config = json.loads((REPOSITORY / f"ds_configs/{kind}.json").read_text())
        return ["--ds_config", json.dumps(config | {"sequence_parallel_size": size})]
    mesh = {"sp_size": size}
    if kind == "hsdp":
        mesh |= {"dp_replicate_size": 2, "dp_shard_size": world_size // 2 // size}
    document: dict[str, Any] = {"distributed_type": "MULTI_GPU" if kind == "ddp" else "FSDP"}
    if kind != "ddp":
        document["fsdp_config"] = {"fsdp_version": 2}
    return ["--accelerate_config", json.dumps(document | {"parallelism_config": mesh})]


KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
PACKED = [
    "--packing",
    "true",
    "--global_batch_size",
    "6",
    "--max_length",
    "61",
]  # rows of 61 tokens: no 2 or 4 divides them
LORA = ["--use_peft", "--learning_rate", "4"]
# What a run computes besides; the reference computes it too.
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "packed": PACKED,
    "lora": LORA,
    "checkpointing": ["--activation_checkpointing"],
    "clipped": ["--max_grad_norm", "0.5"],
    # Tiles of a few tokens, that ranks have different numbers of; the reference computes without.
    "tiled": ["--tiled_loss", "7", "--tiled_mlp", "11"],
    "tiled-checkpointing": ["--tiled_loss", "5", "--tiled_mlp", "9", "--activation_checkpointing"],
    "tiled-lora": [*LORA, "--tiled_loss", "7", "--tiled_mlp", "11"],
}
# What the reference of a variant computes, where that is not the same.
COMPUTED = {"tiled": [], "tiled-checkpointing": [], "tiled-lora": LORA}


def case(kind: str, size: int, world_size: int, accumulation: int = 1, variant: str = "plain", model: str | None = None,
         **more: Any) -> dict[str, Any]:  # fmt: skip
    rows = 6 if variant == "packed" else GLOBAL_BATCH
    micro = max(1, rows * size // world_size // accumulation)
    name = f"{kind}-sp{size}-w{world_size}-k{accumulation}-{variant}" + (f"-{model}" if model else "")
    rate = parity.LEARNING_RATE[model or "sgd"]
    flags = ["--optim", "sgd", "--learning_rate", rate, "--per_device_train_batch_size", str(micro)]
    flags += [*strategy(kind, size, world_size), *VARIANTS[variant], "--per_device_eval_batch_size", str(1 + size)]
    return {"name": name, "variant": variant, "model": model, "flags": flags, **more}


def reference(variant: str = "plain", model: str | None = None) -> dict[str, Any]:
    """One process without any engine."""
    rate = parity.LEARNING_RATE[model or "sgd"]
    flags = ["--optim", "sgd", "--learning_rate", rate, "--per_device_train_batch_size", "16"]
    flags += COMPUTED.get(variant, VARIANTS[variant])
    return {"name": reference_of({"variant": variant, "model": model}), "model": model, "flags": flags}


def reference_of(case: dict[str, Any]) -> str:
    return f"single-{case['variant']}" + (f"-{case['model']}" if case["model"] else "")


def on(world_size: int) -> Iterator[dict[str, Any]]:
    """All cases of one world size: every strategy with every accumulation, and each variant and other model under some."""
    sizes = [size for size in (2, 4) if world_size % size == 0]
    for kind, size, accumulation in itertools.product(KINDS, sizes, parity.ACCUMULATIONS):
        yield case(kind, size, world_size, accumulation)
    if world_size == 4:
        yield case("hsdp", 2, 4, 2)
    undivided = [1] if world_size == 2 else []
    for kind, size, variant in itertools.product(("ddp", "zero3", "fsdp2"), [*undivided, *sizes], list(VARIANTS)[1:]):
        if size == 1 and not variant.startswith("tiled"):
            continue  # testing/parity.py has it
        yield case(kind, size, world_size, 2 if variant == "lora" else 1, variant)
    for kind, model in itertools.product(("zero3", "fsdp2"), parity.MODELS) if world_size == 2 else ():
        yield case(kind, 2, 2, 1, model=model)
