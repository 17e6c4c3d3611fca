"""The cases of parity of sequence parallelism: rows in parts under every strategy, against one process (testing/parity.py)."""

import itertools
from collections.abc import Iterator
from typing import Any

from brigade.train.strategy.axes import Axes

from . import axes, parity
from .command_line import as_flags
from .runs import GLOBAL_BATCH


def strategy(kind: str, size: int, world_size: int) -> list[str]:
    """The flags of a strategy with rows over `size` ranks."""
    rows = Axes(sequence=size)
    return axes.flags(rows, kind, **axes.two_copies(kind, rows, world_size))


KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
PACKED = as_flags(packing=True, global_batch_size=6, max_length=61)  # rows of 61 tokens: no 2 or 4 divides them
LORA = ["--use_peft", "--learning_rate", "4"]
# What a run computes besides; the reference computes it too.
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "packed": PACKED,
    "lora": LORA,
    "checkpointing": ["--activation_checkpointing"],
    "qlora": [*LORA, "--load_in_4bit"],
    "lora-tokens": [*LORA, "--learning_rate", "0.3", "--trainable_token_indices", "<|im_start|>,<|im_end|>,300"],
    "compiled": ["--torch_compile"],
    "clipped": ["--max_grad_norm", "0.5"],
    # Tiles of a few tokens, that ranks have different numbers of; the reference computes without.
    "tiled": ["--tiled_loss", "7", "--tiled_mlp", "11"],
    "tiled-checkpointing": ["--tiled_loss", "5", "--tiled_mlp", "9", "--activation_checkpointing"],
    "tiled-lora": [*LORA, "--tiled_loss", "7", "--tiled_mlp", "11"],
}
# What the reference of a variant computes, where that is not the same.
COMPUTED = {"compiled": [], "tiled": [], "tiled-checkpointing": [], "tiled-lora": LORA}


def case(
    kind: str,
    size: int,
    world_size: int,
    accumulation: int = 1,
    variant: str = "plain",
    model: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    rows = 6 if variant == "packed" else GLOBAL_BATCH
    micro = max(1, rows * size // world_size // accumulation)
    name = f"{kind}-sp{size}-w{world_size}-k{accumulation}-{variant}" + (f"-{model}" if model else "")
    rate = parity.LEARNING_RATE.get(model or "sgd", "0.1")
    flags = ["--optim", "sgd", "--learning_rate", rate, "--per_device_train_batch_size", str(micro)]
    flags += [*strategy(kind, size, world_size), *VARIANTS[variant], "--per_device_eval_batch_size", str(4 + size)]
    return {"name": name, "ranks": world_size, "variant": variant, "model": model, "flags": flags, **more}


def reference(variant: str = "plain", model: str | None = None) -> dict[str, Any]:
    """One process without any engine."""
    rate = parity.LEARNING_RATE.get(model or "sgd", "0.1")
    flags = ["--optim", "sgd", "--learning_rate", rate, "--per_device_train_batch_size", "16"]
    flags += COMPUTED.get(variant, VARIANTS[variant])
    return {"name": reference_of({"variant": variant, "model": model}), "ranks": 1, "model": model, "flags": flags}


def reference_of(case: dict[str, Any]) -> str:
    return f"single-{case['variant']}" + (f"-{case['model']}" if case["model"] else "")


def on(world_size: int) -> Iterator[dict[str, Any]]:
    """The cases of one world size: two ranks have every accumulation, variant and model; four have groups of two and of four."""
    if world_size == 4:
        for kind, size in itertools.product(KINDS, (2, 4)):  # four ranks to two key-value heads
            yield case(kind, size, 4, 4 // size)
        yield case("hsdp", 2, 4, 2)
        for kind, variant in itertools.product(("zero3", "fsdp2"), ("packed", "lora")):
            yield case(kind, 2, 4, 2, variant)
        return
    yield case("ddp", 2, 2, 2, "compiled")
    for kind, accumulation in itertools.product(KINDS, parity.ACCUMULATIONS):
        yield case(kind, 2, 2, accumulation)
    for kind in ("ddp", "zero3", "fsdp2"):
        for variant in ("packed", "lora", "checkpointing", "clipped", "tiled"):
            yield case(kind, 2, 2, 2 if variant == "lora" else 1, variant)
        yield case(kind, 1, 2, 2, "tiled")
    for kind in ("zero3", "fsdp2"):
        for variant in ("tiled-checkpointing", "tiled-lora", "qlora", "lora-tokens"):
            yield case(kind, 2, 2, 1, variant)
        for model in (*parity.MODELS, "mistral"):  # the last with a sliding window
            yield case(kind, 2, 2, 1, model=model)
