"""How the Trainer gets its batches: loaders over our own samples, and the micro-batches of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ..data.collate import ABOUT, Collate, MicroBatch, WithFiller, drawn, on_device
from ..data.sampling import GlobalBatches, Loader, StreamBatches
from ..data.store import Samples
from ..distributed import heartbeat
from ..distributed.process import this_process
from ..local.local_steps import Replica
from ..run.directory import Run
from ..run.hooks import Feature
from ..upstream.trainer import HookedTrainer
from ..watch.throughput import Meter


class BatchingTrainer(HookedTrainer):
    """Transformers' Trainer over our own loaders.

    Accelerate never sees them: it would shard them once more and repeat samples at an epoch's end.

    data_rank: this rank's number among all ranks that see different sequences, over all replicas
    looks_as: (which rank, of how many) this one is when it evaluates held-out samples
    """

    run: Run
    meter: Meter
    collate: Collate
    pad_token_id: int
    data_rank: int
    looks_as: tuple[int, int]
    features: list[Feature]
    replica: Replica

    def to_device(self, inputs: MicroBatch) -> MicroBatch:
        return on_device(inputs, self.args.device)

    def _loader(self, rows: Any, batches: GlobalBatches, collate: Collate) -> Loader:
        return Loader(WithFiller(rows, self.pad_token_id), batches, collate, self.args.dataloader_num_workers)

    def get_train_dataloader(self) -> Loader:
        args, batch, rows = self.args, self.run.batch, self.train_dataset
        kind, supervised = (StreamBatches, None) if rows.streamed else (self.replica.batches(), rows.counted())
        shape = (len(rows), args.per_device_train_batch_size, args.gradient_accumulation_steps)
        of = self.data_rank, batch.data_parallel_size
        return self._loader(rows, kind(*shape, *of, args.seed, supervised, batch.global_size), self.collate)

    def eval_loader(self, samples: Samples | torch.utils.data.Subset, alone: tuple[int, int] | None = None) -> Loader:
        """alone: (this rank, of how many), where each rank reads sequences of its own, and reads them whole"""
        batches = GlobalBatches(len(samples), self.args.per_device_eval_batch_size, 1, *(alone or self.looks_as))
        return self._loader(
            samples, batches, Collate(self.pad_token_id, self.collate.layout) if alone else self.collate
        )

    def set_initial_training_values(self, *about: object) -> tuple[int, ...]:
        epochs, *others = super().set_initial_training_values(*about)
        return self.replica.epochs(epochs), *others

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatch], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], torch.Tensor | int | None]:
        """Return the micro-batches of one step, and the supervised tokens of the step over all ranks, each times its weight.

        There is no micro-batch where the run is over: it wrote its last checkpoint, and died before its model was saved.
        """
        if self.control.should_training_stop:
            return [], None
        streamed, step = self.train_dataset.streamed, self.state.global_step + 1
        self.meter.start()
        this_process.timeline.enter("first step")
        this_process.heartbeat.enter(heartbeat.WINDOW if streamed else heartbeat.DATA, step)
        for feature in self.features:
            feature.before_step()
        began = time.perf_counter()
        micro_batches = [drawn(next(epoch_iterator)) for _ in range(num_batches)]
        about = [batch[ABOUT] for batch in micro_batches]
        self.meter.count(about, time.perf_counter() - began)
        moved = [on_device(batch, device) for batch in micro_batches]
        for feature in self.features:
            feature.before_micro_batches(moved)
        return moved, about[0].step_supervised
