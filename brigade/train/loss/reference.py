"""What the reference thinks of each answer: read where it is known, else computed, before the first step or beside each one.

Log-probabilities that are computed before training lie beside the prepared data, under a name that tells the reference's weights
and precision. Every sample has a number there, or NaN until it is computed: a run that was interrupted goes on with the others.
Each sample's numbers have a checksum beside them: those that are not what was written are computed anew.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from ...errors import console
from ...errors.disk import writing
from ..data.answers import ANSWERS, MISMATCHED
from ..data.collate import FILLER
from ..data.layout import FORMAT, folder_of
from ..data.sampling import GlobalBatches
from ..data.store import MicroBatch, Samples
from ..distributed import consistency, heartbeat, ranks
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..host import files
from ..model import adapter_weights, load
from ..model.location import load_config
from ..model.sizes import half_or_full
from ..recipe.objectives import ADAPTERS_OFF, JUDGED, MODEL
from . import second_model


class Answers(Protocol):
    """What looks at answers (preferences.py). rows: what a row holds"""

    rows: str

    def looking(self) -> AbstractContextManager[None]: ...

    def log_probabilities(
        self, batch: MicroBatch, token_losses: Callable[[MicroBatch], torch.Tensor] | None = None
    ) -> torch.Tensor: ...


TOGETHER = 64  # micro-batches between two writes
_ODD = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64, which mixes bits so


class Reference:
    """Gives samples, or micro-batches, the log-probabilities of their answers under the reference.

    reference: ADAPTERS_OFF, MODEL, a directory or a name on the Hub; precomputes: whether they are computed before training
    """

    def __init__(self, trainer: StepContext, answers: Answers, reference: str, precomputes: bool) -> None:
        self.trainer, self.answers = trainer, answers
        self.reference, self.precomputes = reference, precomputes
        # With new adapters the weights that training begins with are there at any time, in their own precision. Those that go on
        # with others begin as something that their own steps take away.
        model = self.trainer.run.settings.recipe.model
        begins = model.use_peft and model.adapter_name_or_path is None
        self.by_adapters = reference == ADAPTERS_OFF or (precomputes and reference == MODEL and begins)
        self.model: Any = None  # beside the trained one

    def prepare(self, checkpoint: Path | None) -> None:
        """Load the reference, or compute what it thinks of all samples. A collective.

        checkpoint: from which the run goes on; the model has its weights already
        """
        this_process.timeline.enter("reference")
        if not self.precomputes:
            if self.reference != ADAPTERS_OFF:
                self.model = second_model.load_reference(self.trainer, self.reference)
            return
        splits = [self.trainer.data.train, *self.trainer.data.heldout.values()]
        file, columns = self._file(), 1 + (self.answers.rows == JUDGED)
        if self.trainer.run.world.local_rank == 0:
            _create(file, splits[0].samples_in_store, columns)
        ranks.barrier()
        missing = self._missing(file, splits)
        if any(missing):
            if not self.by_adapters and (self.reference != MODEL or checkpoint):
                second_model.check(self.trainer.run, self.reference, self.trainer.model.config)
                self.model = second_model.load_reference(self.trainer, self.reference)
            for split, numbers in zip(splits, missing, strict=True):
                self._compute(file, split, numbers)
            self.model = None
        ranks.barrier()
        known, _ = _read(file)
        for split in splits:
            split.take_reference(known)

    def token_losses(self, batch: MicroBatch) -> torch.Tensor:
        """Return the reference's loss of each target of a micro-batch: (targets,) in fp32."""
        trainer = self.trainer
        if self.by_adapters:
            with trainer.engine.adapters_off(trainer):
                return trainer.token_losses(batch)
        if self.model is None:
            return trainer.token_losses(batch)
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            losses: torch.Tensor = trainer.outputs(self.model, batch, None).loss
        return losses

    # ---- before training ---------------------------------------------------------------------------------------------
    def _file(self) -> Path:
        run, settings = self.trainer.run, self.trainer.run.settings
        digests, config = run.base, self.trainer.model.config
        if self.reference not in (ADAPTERS_OFF, MODEL):
            named = settings.of_second(self.reference)
            config = load_config(named)
            digests = consistency.digests(Path(load.weights(named, config)))
        section, seed = settings.recipe.model, settings.recipe.training.seed
        key: list[Any] = [digests or [config.to_dict(), seed], str(half_or_full(settings)), section.load_in_4bit]
        key += [section.rope_parameters]
        adapters = adapter_weights.find(settings) if self.reference == MODEL else None
        key += [consistency.digests(Path(adapters))] if adapters else []
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return folder_of(f"{self.trainer.data.fingerprint}-{FORMAT}-reference-{name}.npy")

    def _missing(self, file: Path, splits: list[Samples]) -> list[list[int]]:
        """Return the sequences of each split of which some host does not know everything. A collective."""
        own: list[list[int]] = [[] for _ in splits]
        if self.trainer.run.world.local_rank == 0:
            known, damaged = _read(file)
            if damaged:
                print(
                    f"{file}: {damaged:,} samples' log-probabilities are not what was written: computed anew.",
                    file=sys.stderr,
                )
            own = [_unknown(known, split) for split in splits]
        of_ranks = ranks.gather(own)
        return [sorted(set().union(*parts)) for parts in zip(*of_ranks, strict=True)]

    def _compute(self, file: Path, split: Samples, numbers: list[int]) -> None:
        """Compute the log-probabilities of these sequences of a split, and write them. A collective."""
        if not numbers:
            return
        trainer, place = self.trainer, self.trainer.place
        speaks = place.speaks_for_its_data and not place.sequence
        found: list[tuple[list[int], list[list[float]]]] = []
        known: Any = np.load(file, mmap_mode="r+") if trainer.run.world.local_rank == 0 else None
        looking = self.answers.looking()
        with looking, console.bar(len(numbers), "the reference's log-probabilities", "sequences") as bar:
            for count, (samples, batch) in enumerate(self._batches(split, numbers), 1):
                columns = [batch] + ([batch[ANSWERS][MISMATCHED]] if MISMATCHED in batch[ANSWERS] else [])
                values = [self.answers.log_probabilities(each, self.token_losses) for each in columns]
                if speaks:
                    found.append((samples, torch.stack(values, 1).tolist()))
                if count % TOGETHER == 0 or count == self.batches:
                    for own in ranks.gather_all(found):
                        for samples, rows in own if known is not None else ():
                            if samples:  # and not only filler
                                known[samples] = _with_checks(np.array(rows), np.array(samples), file.name)
                    found.clear()
                bar.update(min(self.together, len(numbers) - bar.n))
                this_process.heartbeat.enter(heartbeat.EVALUATION)
        if known is not None:
            known.flush()

    def _batches(self, split: Samples, numbers: list[int]) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield this rank's micro-batches, and the numbers in the store of the samples that are their answers."""
        trainer, chosen = self.trainer, torch.utils.data.Subset(split, numbers)
        chosen.streamed, chosen.counted = False, lambda: None  # type: ignore[attr-defined]
        order = GlobalBatches(len(numbers), trainer.args.per_device_eval_batch_size, 1, *trainer.looks_as)
        self.batches, self.together = len(order), order.places
        places = order.order()[:, 0, order.rank]
        for own, inputs in zip(places, trainer.eval_loader(chosen), strict=True):
            samples = [split.samples_of(numbers[place]) for place in own if place != FILLER]
            batch = trainer.to_device(inputs)
            yield np.concatenate([np.zeros(0, np.int64), *samples]).tolist(), batch


def _create(file: Path, samples: int, columns: int) -> None:
    """Make the file, with NaN for each of (samples, columns), where it is not there or is another one's."""
    unknown = _with_checks(np.full((samples, columns), np.nan), np.arange(samples), file.name)
    if file.exists():
        with suppress(OSError, ValueError):
            there = np.load(file, mmap_mode="r")
            if (there.shape, there.dtype) == (unknown.shape, unknown.dtype):
                return
        print(f"{file} is not what was written: its log-probabilities are computed anew.", file=sys.stderr)
    with writing(file.parent), files.replacing(file, secret=True) as new:
        np.save(new, unknown)


def _with_checks(values: np.ndarray, samples: np.ndarray, name: str) -> np.ndarray:
    """Return what the file has of samples: their log-probabilities and a checksum of these, of the sample and of the file.

    values: fp64 (samples, columns); samples: their numbers in the store; name: the file's
    """
    kept = np.zeros(len(values), [("values", np.float64, (values.shape[1],)), ("check", np.uint64)])
    kept["values"] = values
    mixed = samples.astype(np.uint64) ^ np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    for bits in np.ascontiguousarray(kept["values"]).view(np.uint64).T:
        mixed = (mixed ^ bits) * _ODD
        mixed ^= mixed >> np.uint64(32)
    kept["check"] = mixed
    return kept


def _read(file: Path) -> tuple[np.ndarray, int]:
    """Return the log-probabilities in a file, fp64 (samples, columns), and how many samples have others than were written: these
    are NaN, as unknown ones are."""
    kept = np.load(file)
    values = np.ascontiguousarray(kept["values"])
    damaged = kept["check"] != _with_checks(values, np.arange(len(kept)), file.name)["check"]
    values[damaged] = np.nan
    return values, int(damaged.sum())


def _unknown(known: np.ndarray, split: Samples) -> list[int]:
    """Return the sequences of a split of which something is not known."""
    unknown = np.isnan(known).any(axis=1)
    return [number for number in range(len(split)) if unknown[split.samples_of(number)].any()]
