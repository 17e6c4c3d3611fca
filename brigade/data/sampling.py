"""Which rank sees which sample in which step: every sample exactly once per epoch, at any world size.

Accelerate's `even_batches` repeats samples where an epoch does not divide, so runs on 1, 2 and 4 ranks part at the
first epoch's end. Here the last step of an epoch is filled up with FILLER samples, which carry no supervised token:
they add nothing to loss, gradient or token count, and keep the ranks' collectives in step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

FILLER = -1
IGNORED = -100  # the label that torch's cross-entropy and Transformers skip


class GlobalBatches:
    """A batch sampler: the micro-batches of one data-parallel rank, in order, as lists of sample indices.

    The order of samples depends on `seed` and epoch alone (PCG64 permutation; file order where seed is None), and so
    does the set of samples of every optimizer step, whatever the number of ranks and of accumulation steps.
    """

    def __init__(
        self, samples: int, micro: int, accumulation: int, rank: int, world_size: int, seed: int | None = None
    ) -> None:
        self.samples, self.micro, self.accumulation = samples, micro, accumulation
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.samples // (self.micro * self.accumulation * self.world_size))

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """All samples of this epoch in order, filled up to whole steps; shape (steps, accumulation, ranks, micro)."""
        shape = (self.steps, self.accumulation, self.world_size, self.micro)
        order = np.full(np.prod(shape, dtype=int), FILLER)
        order[: self.samples] = np.arange(self.samples)
        if self.seed is not None:
            order[: self.samples] = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        return order.reshape(shape)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.order()[:, :, self.rank]:
            for micro_batch in step:
                yield micro_batch.tolist()


class WithFiller(torch.utils.data.Dataset):
    """A data set of {"input_ids", "labels"} whose item FILLER is a sample of two unsupervised tokens."""

    def __init__(self, dataset: Sequence[dict[str, list[int]]], pad_token_id: int) -> None:
        self.dataset = dataset
        self.filler = {"input_ids": [pad_token_id] * 2, "labels": [IGNORED] * 2}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.filler if index == FILLER else self.dataset[index]


class Padding:
    """Collates samples to tensors of shape (micro-batch, longest of them), padded on the right."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        shape = (len(samples), longest)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "labels": torch.full(shape, IGNORED),
        }
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            batch["input_ids"][row, :length] = torch.as_tensor(sample["input_ids"])
            batch["labels"][row, :length] = torch.as_tensor(sample["labels"])
            batch["attention_mask"][row, :length] = 1
        return batch


class Loader(torch.utils.data.DataLoader):
    """A DataLoader over GlobalBatches that takes an epoch's number. It stays out of accelerator.prepare, which would
    shard and pad the batches once more."""

    def __init__(self, dataset: WithFiller, batches: GlobalBatches, pad_token_id: int, workers: int) -> None:
        super().__init__(
            dataset,
            batch_sampler=batches,
            collate_fn=Padding(pad_token_id),
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # its own: a fetch must not advance the run's random numbers
        )

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
