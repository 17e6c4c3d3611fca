"""Which samples a replica of an elastic run sees: those of its place in each step, from the step on at which it came."""

from collections.abc import Callable, Iterator
from typing import Any

from .sampling import FILLER, GlobalBatches, Indices


class MovingBatches(GlobalBatches):
    """GlobalBatches that begin at the run's step, and go on from one epoch to the next by themselves.

    step: the number of steps that the run has made when this rank takes its first batch
    """

    def __init__(self, *shape: Any, step: Callable[[], int]) -> None:
        super().__init__(*shape)
        self.step, self.next = step, -1

    def __iter__(self) -> Iterator[Indices]:
        self.next = self.step() if self.next < 0 else self.next
        left = self.steps
        while left:
            epoch, first = divmod(self.next, self.steps)
            super().set_epoch(epoch)
            for step in self.order()[first : first + left]:
                supervised = int(self.supervised[step[step != FILLER]].sum()) if self.supervised is not None else None
                self.next, left = self.next + 1, left - 1
                for micro_batch in step[:, self.rank]:
                    yield Indices(micro_batch.tolist(), supervised)

    def set_epoch(self, epoch: int) -> None:
        """The step says it."""
