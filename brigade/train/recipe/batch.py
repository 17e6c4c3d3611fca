"""The arithmetic of one optimizer step's global batch. This module imports no torch."""

import math
from dataclasses import dataclass

from ...errors import UserError
from ...errors.console import counted
from ...errors.tables import Document
from .training_section import TrainingSection


@dataclass(frozen=True)
class Batch:
    """The arithmetic of one optimizer step: micro x accumulation x data_parallel_size places for global_size sequences.

    Places without a sequence get filler in the last micro-step, which has no supervised token (data/sampling.py): the step
    computes what it would on any other number of ranks.
    learning_rate: after scaling with the global batch; why: where the micro-batch comes from, if not from the recipe
    """

    global_size: int
    micro: int
    accumulation: int
    data_parallel_size: int
    learning_rate: float
    why: str = ""

    @property
    def fillers(self) -> int:
        return self.micro * self.accumulation * self.data_parallel_size - self.global_size

    @property
    def wasted(self) -> float:
        """The fillers' share of a step's work."""
        return self.fillers / (self.fillers + self.global_size)

    def __str__(self) -> str:
        micro = f"{self.micro} ({self.why})" if self.why else str(self.micro)
        ranks = counted(self.data_parallel_size, "data-parallel rank")
        less = f" - {counted(self.fillers, 'filler')} ({self.wasted:.1%} of the work)" if self.fillers else ""
        size = counted(self.global_size, "sequence")
        return f"{size} = micro-batch {micro} x accumulation {self.accumulation} x {ranks}{less}"


def batch_arithmetic(
    training: TrainingSection, data_parallel_size: int, place: str, fits: int = 1, why: str = ""
) -> Batch:
    """Choose accumulation (and an "auto" micro-batch) so that the global batch stays what the recipe says.

    fits, why: the largest micro-batch that "auto" may take, and who says so. Among those with the fewest fillers, "auto" takes
    the largest. A micro-batch above a rank's whole share becomes that share.
    Learning-rate scaling (Goyal et al. 2017, linear; Krizhevsky 2014, sqrt): lr x (global / reference) or its root.
    Raises UserError at `place` where there are more ranks than sequences: some ranks would never get one.
    """
    size, ranks, wanted = training.global_batch_size, data_parallel_size, training.per_device_train_batch_size
    if size < ranks:
        raise UserError(
            place,
            f"global_batch_size {size} does not give each of {ranks} data-parallel ranks a sequence",
            f"set it to {ranks} or more, or use at most {counted(size, 'rank')}",
        )
    share = math.ceil(size / ranks)
    if wanted == "auto":
        micro = max(m for m in range(1, min(fits, share) + 1) if share % m == 0)
    else:
        micro, why = min(wanted, share), f"not {wanted}: a rank has no more" if wanted > share else ""
    factor = size / (training.reference_batch_size or size)
    scale = {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}[training.learning_rate_scaling]
    return Batch(size, micro, math.ceil(size / (micro * ranks)), ranks, training.learning_rate * scale, why)


def length(training: Document) -> tuple[str, float | None]:
    """(key, value) of the setting that decides how long a run is: max_steps, or num_train_epochs where that is -1."""
    key = "max_steps" if training.get("max_steps", -1) > 0 else "num_train_epochs"
    return key, training.get(key)
