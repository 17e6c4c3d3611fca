"""The cases of parity of rows in parts beside tensor groups or stages. Experts beside other axes: axes_experts.py."""

from typing import Any

from brigade.train.strategy.axes import Axes

from . import axes_sequence
from .axes import flags
from .axes_sequence import VARIANTS
from .runs import GLOBAL_BATCH

TENSOR, PIPELINE = Axes(tensor=2, sequence=2), Axes(stages=2, sequence=2)
# (axes, kind of strategy, accumulation, variant), on four ranks
CASES = [
    *((TENSOR, kind, 2, "plain") for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    *((TENSOR, kind, 1, "packed") for kind in ("zero3", "fsdp2")),
    *((TENSOR, kind, 2, "lora") for kind in ("zero3", "fsdp2")),
    *((PIPELINE, kind, accumulation, "plain") for kind in ("ddp", "zero1") for accumulation in (2, 4)),
    (PIPELINE, "zero1", 2, "packed"),
    (PIPELINE, "ddp", 4, "lora"),
    (PIPELINE, "zero1", 2, "clipped"),
]


def case(
    axes: Axes, kind: str, accumulation: int, variant: str = "plain", ranks: int = 4, **more: Any
) -> dict[str, Any]:
    """A run over so many ranks, as axes_sequence.case has them."""
    micro = max(1, (6 if variant == "packed" else GLOBAL_BATCH) // axes.data(ranks) // accumulation)
    usual = f"--optim sgd --learning_rate 0.6 --per_device_train_batch_size {micro} --per_device_eval_batch_size 7"
    words = [*usual.split(), *flags(axes, kind), *VARIANTS[variant]]
    name = f"{axes}-{kind}-k{accumulation}-{variant}"
    # DeepSpeed keeps AutoTP's groups until its process ends, so these have processes of their own.
    group = "AutoTP" if axes.tensor > 1 and kind.startswith("zero") else ""
    return {"name": name, "ranks": ranks, "group": group, "variant": variant, "flags": words, "model": None, **more}


reference = axes_sequence.reference
