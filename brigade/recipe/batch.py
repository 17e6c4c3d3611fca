"""The arithmetic of one optimizer step's global batch. This module imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..errors.console import counted
from .schema import TrainingSection


@dataclass(frozen=True)
class Batch:
    """The arithmetic of one optimizer step: global_size = micro x accumulation x data_parallel_size sequences.

    learning_rate: after scaling with the global batch; why: where the micro-batch comes from, if not from the recipe.
    """

    global_size: int
    micro: int
    accumulation: int
    data_parallel_size: int
    learning_rate: float
    why: str = ""

    def __str__(self) -> str:
        micro = f"{self.micro} ({self.why})" if self.why else str(self.micro)
        ranks = counted(self.data_parallel_size, "data-parallel rank")
        return f"{counted(self.global_size, 'sequence')} = micro-batch {micro} x accumulation {self.accumulation} x {ranks}"


def batch_arithmetic(
    training: TrainingSection, data_parallel_size: int, place: str, fits: int = 1, why: str = ""
) -> Batch:
    """Fill accumulation (and an "auto" micro-batch) so that the global batch stays what the recipe says.

    fits, why: the largest micro-batch that "auto" may take, and who says so. One above a rank's whole share becomes that share.
    Learning-rate scaling (Goyal et al. 2017, linear; Krizhevsky 2014, sqrt): lr x (global / reference) or its root.
    Raises UserError at `place` when micro-batch x ranks does not divide the global batch.
    """
    size, ranks, wanted = training.global_batch_size, data_parallel_size, training.per_device_train_batch_size
    if size % ranks:
        unit = ranks if wanted == "auto" else ranks * wanted
        near = sorted({max(unit, size // unit * unit), math.ceil(size / unit) * unit})
        raise UserError(
            place,
            f"global_batch_size {size} does not divide over {ranks} data-parallel ranks",
            f"set it to {' or '.join(map(str, near))}, or use a number of ranks that divides {size}",
        )
    share = size // ranks
    if wanted == "auto":
        micro = max(m for m in range(1, min(fits, share) + 1) if share % m == 0)
    else:
        micro, why = min(wanted, share), f"not {wanted}: a rank has no more" if wanted > share else ""
    if share % micro:
        choices = [str(m) for m in range(1, min(share, 1024) + 1) if share % m == 0]
        raise UserError(
            place,
            f"global_batch_size {size} is not micro-batch {micro} x {counted(ranks, 'rank')} x a whole number of "
            "accumulation steps",
            f"set per_device_train_batch_size to {'one of ' if len(choices) > 1 else ''}{', '.join(choices[:8])}",
        )
    factor = size / (training.reference_batch_size or size)
    scale = {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}[training.learning_rate_scaling]
    return Batch(size, micro, share // micro, ranks, training.learning_rate * scale, why)


def length(training: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, value) of what says how long a run is: max_steps, or num_train_epochs where that is -1."""
    key = "max_steps" if training.get("max_steps", -1) > 0 else "num_train_epochs"
    return key, training.get(key)
