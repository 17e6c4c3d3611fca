"""The cases of the GPU lane: strategies for a few steps on fake GPUs, and the same without an engine on a CPU."""

from typing import Any

from . import parity
from .runs import GLOBAL_BATCH

STEPS, RANKS = 3, 2
TOLERANCE = {"fp32": parity.TOLERANCE, "bf16": 0.02}  # relative, of fp32's losses on the CPU
CASES = {"ddp": "bf16", "zero3": "bf16", "fsdp2": "fp32"}  # strategy -> precision


def run_case(strategy: str) -> dict[str, Any]:
    """Return a run on fake GPUs as testing.runs.run_cases takes it."""
    precision = [] if CASES[strategy] == "fp32" else [f"--{CASES[strategy]}"]
    return _run(strategy, [*parity.STRATEGIES[strategy], *precision], GLOBAL_BATCH // RANKS // 2)


def reference() -> dict[str, Any]:
    """Return one process without any engine, in fp32."""
    return _run("reference", [], GLOBAL_BATCH)


def _run(name: str, flags: list[str], micro: int) -> dict[str, Any]:
    usual = f"--optim sgd --learning_rate 0.6 --per_device_train_batch_size {micro} --max_steps {STEPS}"
    usual += f" --eval_steps {STEPS} --per_device_eval_batch_size 3 --attn_implementation varlen"
    return {"name": name, "flags": [*flags, *usual.split()]}
