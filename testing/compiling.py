"""Runs with compiled layers, each beside the same run without: what is combined, and how many programs torch makes."""

from typing import Any

from . import parity, runs

SHARED = ["--max_steps", "6", "--optim", "sgd", "--eval_steps", "3"]
WITH = {  # what a case adds to its strategy: flags, and a model's name or none
    "": ([], None),
    "LoRA": (["--use_peft", "--learning_rate", "3"], None),
    "QLoRA": (["--use_peft", "--load_in_4bit", "--learning_rate", "1"], None),
    "packing": (["--packing", "true"], None),
    "recomputing": (["--activation_checkpointing"], None),
    "recomputing each 2nd": (["--activation_checkpointing", "{every_n: 2}"], None),
    "inputs on the host": (["--activation_checkpointing", "offload"], None),
    "LoRA, recomputing": (["--use_peft", "--learning_rate", "3", "--activation_checkpointing"], None),
    "tiled_loss": (["--tiled_loss", "24"], None),
    "padding": (["--padding_free", "false"], None),
    "experts": (["--learning_rate", "0.1"], "qwen3_moe"),
    "experts, recomputing": (["--learning_rate", "0.1", "--activation_checkpointing"], "qwen3_moe"),
}
SINGLE: dict[str, tuple[int, list[str]]] = {"single": (1, [])}
ENGINES = {name: (2, parity.STRATEGIES[name]) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")}
ALONE = {  # a strategy with nothing besides
    "zero3_hpz": (2, parity.STRATEGIES["zero3_hpz"]),
    "hsdp": (4, parity.STRATEGIES["hsdp"]),
}
STRATEGIES: dict[str, tuple[int, list[str]]] = SINGLE | ENGINES | ALONE


def name_of(strategy: str, addition: str) -> str:
    return f"{strategy}, {addition}" if addition else strategy


def case(strategy: str, addition: str = "", compiled: bool = True) -> dict[str, Any]:
    """One run: the strategy's, with what WITH adds; of "single" and not compiled the others' reference."""
    (ranks, flags), (more, model) = STRATEGIES[strategy], WITH[addition]
    micro = str(runs.GLOBAL_BATCH // ranks // 2)
    flags = [*flags, *SHARED, *more, "--per_device_train_batch_size", micro, *["--torch_compile"] * compiled]
    name = name_of(strategy, addition) + ("" if compiled else " as it is")
    return {"name": name, "ranks": ranks, "flags": flags} | ({"model": model} if model else {})


def reference(addition: str = "") -> dict[str, Any]:
    return case("single", addition, compiled=False)
