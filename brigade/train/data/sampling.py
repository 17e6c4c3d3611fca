"""Which rank sees which sample in which step: every sample exactly once per epoch, at any world size.

Accelerate's `even_batches` repeats samples where an epoch does not divide, so runs on 1, 2 and 4 ranks part at the
first epoch's end. Here the last step of an epoch is filled up with FILLER samples, which carry no supervised token:
they add nothing to loss, gradient or token count, and keep the ranks' collectives in step. So is each step where the ranks'
micro-batches have more places than the global batch has sequences. (A sample here is a sequence, however many are packed in it.)
"""

import copy
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from .collate import FILLER, CarriesErrors, Collate, WithFiller


class Indices(list):  # type: ignore[type-arg]
    """The samples of one micro-batch.

    supervised: supervised tokens of its optimizer step, over all ranks, each times its weight; where nobody knows them yet,
    sequences: the samples of that step, by which they can be looked up
    """

    def __init__(self, samples: Iterable[int], supervised: float | None = None, sequences: range | None = None) -> None:
        super().__init__(samples)
        self.supervised, self.sequences = supervised, sequences


class GlobalBatches:
    """A batch sampler: the micro-batches of one data-parallel rank, in order, as lists of sample indices.

    The order of samples depends only on `seed` and epoch (PCG64 permutation; file order where seed is None), and so
    does the set of samples of every optimizer step, whatever the number of ranks and of accumulation steps.

    supervised: supervised tokens of each sample, times its weight. As every rank knows what the others get, it also knows a
        step's sum over all of them, and no collective is needed.
    global_size: samples of a step; default: as many as it has places. Places beyond hold FILLER, at the end of the step.
    """

    def __init__(
        self,
        samples: int,
        micro: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int | None = None,
        supervised: np.ndarray | None = None,
        global_size: int | None = None,
    ) -> None:
        self.samples, self.micro, self.accumulation = samples, micro, accumulation
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0
        self.supervised, self.global_size = supervised, global_size or self.places

    @property
    def places(self) -> int:
        """Samples that the micro-batches of a step can hold, over all ranks."""
        return self.micro * self.accumulation * self.world_size

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.samples // self.global_size)

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """Return all samples of this epoch in order, filled up to whole steps; shape (steps, accumulation, ranks, micro)."""
        order = np.full(self.steps * self.global_size, FILLER)
        order[: self.samples] = np.arange(self.samples)
        if self.seed is not None:
            order[: self.samples] = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        return self._placed(order.reshape(self.steps, self.global_size))

    def _placed(self, steps: np.ndarray) -> np.ndarray:
        """Return steps of global_size samples each in the places that take them; shape as of order()."""
        filled = np.pad(steps, ((0, 0), (0, self.places - self.global_size)), constant_values=FILLER)
        return filled.reshape(-1, self.accumulation, self.world_size, self.micro)

    def of_step(self, step: int) -> np.ndarray:
        """Return the samples of one of the run's steps (from 0); shape (accumulation, ranks, micro)."""
        epoch, number = divmod(step, self.steps)
        batches = copy.copy(self)
        batches.set_epoch(epoch)
        return batches.order()[number]

    def _of_all(self, step: np.ndarray) -> float | None:
        """Return what a step's loss is divided by; 1 where all its samples weigh 0, and nothing is to be divided."""
        return None if self.supervised is None else self.supervised[step[step != FILLER]].sum().item() or 1

    def __iter__(self) -> Iterator["Indices"]:
        for step in self.order():
            supervised = self._of_all(step)
            for micro_batch in step[:, self.rank]:
                yield Indices(micro_batch.tolist(), supervised)


class StreamBatches(GlobalBatches):
    """GlobalBatches of a stream, whose windows are shuffled already: sequences by their number."""

    def of_step(self, step: int) -> np.ndarray:
        first = step * self.global_size
        return self._placed(np.arange(first, first + self.global_size)[None])[0]

    def __iter__(self) -> Iterator[Indices]:
        for first in range(0, self.samples, self.global_size):
            for micro_batch in self.of_step(first // self.global_size)[:, self.rank]:
                yield Indices(micro_batch.tolist(), sequences=range(first, first + self.global_size))


class Loader(torch.utils.data.DataLoader):
    """A DataLoader over GlobalBatches that takes an epoch's number. It stays out of accelerator.prepare, which would
    shard and pad the batches once more. Who draws from it calls drawn()."""

    def __init__(self, sequences: WithFiller, batches: GlobalBatches, collate: Collate, workers: int) -> None:
        super().__init__(
            sequences,
            batch_sampler=batches,
            collate_fn=CarriesErrors(collate),
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # its own: a fetch must not advance the run's random numbers
        )

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
