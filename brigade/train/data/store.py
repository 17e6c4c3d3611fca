"""Sequences read from flat memory-mapped arrays: tokens of all samples end to end, a mask, and which samples make up a sequence.

A sequence is what global_batch_size counts: an item, or the items packed into one. An item is what the loss is the mean over: a
sample, or of PAIRS two, the better answer and the worse one behind it.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..host.checksums import Manifest
from ..recipe.objectives import ANSWERS
from .image_store import StoredImages
from .kinds import KINDS
from .known import Known
from .packing import Sequences
from .stored_files import Flat, array

# Raise it where other answers become mismatched, or a reference's log-probabilities of them were wrong.
MISMATCHED_AS = 1
IGNORED = -100  # the label that torch's cross-entropy and Transformers skip

TokenSequence = dict[str, Any]  # arrays, and of JUDGED another TokenSequence
MicroBatch = dict[str, Any]  # a model's inputs, and what is not for it (collate.py)


class Samples(Sequence[TokenSequence]):
    """The sequences of one split, each read when it is asked for. stored: how many the split has

    [i] -> {"input_ids": int32 (tokens,), "labels": int64 (tokens,), IGNORED where unsupervised and at each sample's first
    token, "lengths": int64 (samples of the sequence,)}

    Samples of PAIRS alternate: better, worse, better, worse. JUDGED have two further keys. "desirable": bool (samples,), whether
    each answer is labelled good; "mismatched": a TokenSequence of as many samples, each the prompt of one with the answer of
    another row, cut at max_length: KTO estimates a KL divergence by them. From take_known() on there is "reference", in both:
    fp64 (samples,); or "teacher": fp64 (supervised tokens, columns), rows of divergence.as_rows().

    In the training split of a store with weights there is "weights": float64 (samples of the sequence,), those of their losses.

    Where rows may have images there is "images": list[ImageSource], those of all its samples in the order of their tokens.
    """

    streamed = False
    _manifest: Manifest = None  # type: ignore[assignment]  # until __init__
    _known: Known | None = None  # of all samples in the store: their own, and of JUDGED the mismatched ones'

    def __init__(
        self, folder: Path, split: str, most: int | None = None, rows: str = ANSWERS, max_length: int | None = None
    ) -> None:
        """most: take only so many, spread evenly; rows: ANSWERS, PAIRS or JUDGED; max_length: of a mismatched sample

        Raises DamagedFile, as reading a sample does, where a file is not what was written.
        """
        self.folder, self.split, self.most, self.rows, self.max_length = folder, split, most, rows, max_length
        self.kind = KINDS[rows]
        manifest = self._manifest = self._manifest or Manifest(folder)
        self._tokens, self._mask = Flat(manifest, "tokens", np.int32), Flat(manifest, "supervised", bool)
        self._begins, self._counts = (array(manifest, f"{name}.npy") for name in ("begins", "counts"))
        self._sequences, self._samples = (array(manifest, f"{split}.{name}.npy") for name in ("rows", "samples"))
        # Held-out losses are not weighted.
        weighs = split == "train" and "weights.npy" in manifest
        self._weights = array(manifest, "weights.npy") if weighs else None
        self._images = StoredImages(folder, manifest) if StoredImages.are_in(manifest) else None
        self._whole, self.stored = self._samples, len(self)
        if most and most < self.stored:
            whole = Sequences(self._samples, np.diff(self._sequences))
            part = whole.in_order(np.linspace(0, self.stored - 1, most, dtype=int))
            self._samples, self._sequences = part.samples, np.concatenate([[0], np.cumsum(part.sizes)])

    def __len__(self) -> int:
        return len(self._sequences) - 1

    def __getitem__(self, index: int) -> TokenSequence:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        samples = self.samples_of(index)
        found = _end_to_end([self._sample(sample) for sample in samples])
        if self._weights is not None:
            found["weights"] = np.array(self._weights[samples])
        if self._images:
            found["images"] = [image for sample in samples for image in self._images.of(sample)]
        if self.kind.mismatched:
            found["desirable"] = np.array(self._desirable[samples])
            found["mismatched"] = _end_to_end([self._mismatched(sample) for sample in samples])
        if self._known:
            values, key = self._known.of(samples), self._known.key
            found[key] = values if key == "teacher" else values[:, 0]
            if self.kind.mismatched:
                found["mismatched"][key] = values[:, 1]
        return found

    def begins_of_rows(self, by_token: bool) -> np.ndarray:
        """Return at which row the supervised tokens of each sample begin, in the store and not only in this split, and their end;
        not by_token: a sample has one row. int64 (samples + 1,)"""
        rows = np.asarray(self._counts, np.int64) if by_token else np.ones(len(self._counts), np.int64)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])

    def take_known(self, known: Known) -> None:
        """Give each sample what a second model says of it: of a reference, 1 or 2 columns for each answer."""
        self._known = known

    def _sample(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a sample, and which of them are supervised."""
        part = slice(self._begins[sample], self._begins[sample + 1])
        return self._tokens[part], self._mask[part]

    def _mismatched(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompt of a sample, the tokens before its first supervised one, with the answer of another row."""
        (tokens, mask), (others, their_mask) = self._sample(sample), self._sample(self._other[sample])
        end, begin = int(mask.argmax()), int(their_mask.argmax())
        both = (tokens[:end], others[begin:]), (mask[:end], their_mask[begin:])
        ids, own = (np.concatenate(parts)[: self.max_length] for parts in both)
        return ids, own

    @functools.cached_property
    def _desirable(self) -> np.ndarray:
        return array(self._manifest, "desirable.npy")

    @functools.cached_property
    def _other(self) -> np.ndarray:
        """For each sample of the split another row's: the next one in a random cycle of all, which neither packing, the number of
        ranks nor `most` changes: what a reference says of the two is kept (MISMATCHED_AS)."""
        cycle = np.random.Generator(np.random.PCG64(0)).permutation(np.sort(self._whole))
        following, row_of = np.roll(cycle, -1), array(self._manifest, "row_of.npy")
        # Both answers of a pair are one row's: where they stand side by side, the first takes what follows the second.
        same = row_of[cycle] == row_of[following]
        other = np.zeros(len(row_of), np.int64)
        other[cycle] = np.where(same, np.roll(cycle, -2), following)
        return other

    def samples_of(self, index: int) -> np.ndarray:
        """Return the numbers in the store of the samples that make up a sequence; int64 (samples,)."""
        return self._samples[self._sequences[index] : self._sequences[index + 1]]

    def counted(self) -> np.ndarray:
        """Return what the loss of a step is divided by, of each sequence: its supervised tokens, but of PAIRS and JUDGED its
        items; int64 (sequences,). With weights each token counts as much as its sample weighs: float64."""
        if self._weights is not None:
            return self._sums(self._weights * self._counts)
        return self.supervised() if self.kind.counts_tokens else np.diff(self._sequences) // self.kind.samples

    def supervised(self) -> np.ndarray:
        """Return the supervised tokens of each sequence; int64 (sequences,)."""
        return self._sums(np.asarray(self._counts))

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sequence; int64 (sequences,)."""
        return self._sums(np.diff(self._begins))

    def _sums(self, of_samples: np.ndarray) -> np.ndarray:
        return (
            np.add.reduceat(of_samples[self._samples], self._sequences[:-1])
            if len(self)
            else np.zeros(0, dtype=np.int64)
        )

    def __getstate__(self) -> tuple[object, ...]:  # a worker process maps the files anew
        how = self.folder, self.split, self.most, self.rows, self.max_length
        return *how, self._manifest, self._known

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *how, self._manifest, self._known = state
        self.__init__(*how)  # type: ignore[misc]


def _end_to_end(samples: list[tuple[np.ndarray, np.ndarray]]) -> TokenSequence:
    """Return samples, each as token ids and which of them are supervised, as one sequence."""
    tokens, mask = (np.concatenate(parts) for parts in zip(*samples, strict=True))
    return {
        "input_ids": tokens,
        "labels": np.where(mask, tokens, IGNORED).astype(np.int64),
        "lengths": np.array([len(ids) for ids, _ in samples], dtype=np.int64),
    }
