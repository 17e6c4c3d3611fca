"""Which rank sees which rows of a stream."""

from collections.abc import Iterator

import numpy as np

from .sampling import GlobalBatches, Indices


class StreamBatches(GlobalBatches):
    """GlobalBatches of a stream, whose windows are shuffled already: rows by their number."""

    def of_step(self, step: int) -> np.ndarray:
        first = step * self.global_size
        (found,) = self._placed(np.arange(first, first + self.global_size)[None])
        return found

    def __iter__(self) -> Iterator[Indices]:
        for first in range(0, self.samples, self.global_size):
            for micro_batch in self.of_step(first // self.global_size)[:, self.rank]:
                yield Indices(micro_batch.tolist(), rows=range(first, first + self.global_size))
