"""What a second model says of all samples, computed by all ranks before the first step and kept beside the prepared data."""

import base64
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...errors import console
from ..data.collate import FILLER
from ..data.known import Known
from ..data.layout import FORMAT, folder_of
from ..data.sampling import GlobalBatches
from ..data.store import MicroBatch, Samples
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..model.sizes import half_or_full

TOGETHER, MOST = 2**20, 2**26  # bytes of rows between two writes, and of a message between ranks
Look = Callable[[MicroBatch], np.ndarray]  # rows of a micro-batch's samples, in their order: fp64 (rows, columns)


class Precomputed:
    """Completes what is known of the samples of a run.

    key: as in Known; what: its name in messages; columns: how many a row has; made_of: everything that determines the numbers,
        except the data and the precision
    by_token: whether each row belongs to a supervised token, and each rank reads whole sequences of its own; else to a sample
    """

    def __init__(
        self, trainer: StepContext, key: str, what: str, columns: int, made_of: list[Any], by_token: bool = False
    ) -> None:
        self.trainer, self.what, self.by_token = trainer, what, by_token
        run, place = trainer.run, trainer.place
        self.writes = run.world.local_rank == 0
        self.splits = [trainer.data.train, *trainer.data.heldout.values()]
        self.looks_as = (run.world.rank, run.world.size) if by_token else trainer.looks_as
        self.speaks = by_token or (place.speaks_for_its_data and not place.sequence)
        about = json.dumps([*made_of, str(half_or_full(run.settings))], sort_keys=True, default=str)
        name = f"{hashlib.sha256(about.encode()).hexdigest()[:16]}-xxh3"
        file = folder_of(f"{trainer.data.fingerprint}-{FORMAT}-{key}-{name}.npy")
        self.known = Known(file, key, self.splits[0].begins_of_rows(by_token), columns)

    def complete(self, load: Callable[[], Look]) -> None:
        """Compute what is not known, and give it to the samples. A collective. load: called where something is not known"""
        if self.writes:
            self.known.create()
        ranks.barrier()
        missing = self._missing()
        if any(missing):
            look = load()
            for split, numbers in zip(self.splits, missing, strict=True):
                self._compute(split, numbers, look)
        ranks.barrier()
        for split in self.splits:
            split.take_known(self.known)

    def _missing(self) -> list[list[int]]:
        """Return the sequences of each split of which some host does not know everything. A collective."""
        own: list[list[int]] = [[] for _ in self.splits]
        if self.writes:
            unknown, damaged = self.known.unknown()
            if damaged:
                whose = "tokens" if self.by_token else "samples"
                said = f"{damaged:,} {whose}' {self.what} are not what was written: computed anew."
                print(f"{self.known.file}: {said}", file=sys.stderr)
            own = [[n for n in range(len(split)) if unknown[split.samples_of(n)].any()] for split in self.splits]
        return [sorted(set().union(*parts)) for parts in zip(*ranks.gather(own), strict=True)]

    def _compute(self, split: Samples, numbers: list[int], look: Look) -> None:
        """Compute the rows of these sequences of a split, and write them. A collective."""
        if not numbers:
            return
        found: list[tuple[np.ndarray, np.ndarray]] = []
        order = GlobalBatches(len(numbers), self.trainer.args.per_device_eval_batch_size, 1, *self.looks_as)
        with console.bar(len(numbers), f"the {self.known.key}'s {self.what}", "sequences") as bar:
            for count, (samples, batch) in enumerate(self._batches(split, numbers, order), 1):
                values = look(batch)
                if self.speaks:
                    found.append((self.known.rows_of(samples), values))
                if count == len(order) or ranks.largest(sum(values.nbytes for _, values in found)) > TOGETHER:
                    self._write(found)
                    found.clear()
                bar.update(min(order.places, len(numbers) - bar.n))
                this_process.heartbeat.enter(heartbeat.EVALUATION)
        if self.writes:
            self.known.flush()

    def _write(self, found: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write what all ranks have found, in messages that are not too long. A collective."""
        rows = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in found)])
        values = np.concatenate([np.zeros((0, self.known.columns)), *(values for _, values in found)])
        size = max(1, MOST // (8 * self.known.columns))
        for begin in range(0, ranks.largest(len(rows)), size):
            part = slice(begin, begin + size)
            sent = rows[part].tolist(), base64.b64encode(values[part].tobytes()).decode()
            for of_rank, text in ranks.gather_all(sent):
                if self.writes and of_rank:  # and not only filler
                    received = np.frombuffer(base64.b64decode(text)).reshape(-1, self.known.columns)
                    self.known.write(np.array(of_rank), received)

    def _batches(
        self, split: Samples, numbers: list[int], order: GlobalBatches
    ) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Yield the numbers in the store of the samples of this rank's micro-batches, and the micro-batches."""
        chosen = torch.utils.data.Subset(split, numbers)
        loader = self.trainer.eval_loader(chosen, self.looks_as if self.by_token else None)
        for own, inputs in zip(order.order()[:, 0, order.rank], loader, strict=True):
            samples = [split.samples_of(numbers[place]) for place in own if place != FILLER]
            yield np.concatenate([np.zeros(0, np.int64), *samples]), self.trainer.to_device(inputs)
