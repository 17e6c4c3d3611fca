"""Sequences read from flat memory-mapped arrays: tokens of all samples end to end, a mask, and which samples make up a sequence.

A sequence is what global_batch_size counts: a sample, or the samples packed into one.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

IGNORED = -100  # the label that torch's cross-entropy and Transformers skip

TokenSequence = dict[str, np.ndarray]


class Samples(Sequence[TokenSequence]):
    """The sequences of one split, each read when it is asked for. stored: how many the split has

    [i] -> {"input_ids": int32 (tokens,), "labels": int64 (tokens,), IGNORED where unsupervised and at each sample's first
    token, "lengths": int64 (samples of the sequence,)}
    """

    streamed = False

    def __init__(self, folder: Path, split: str, most: int | None = None) -> None:
        """most: take only so many, spread evenly, of a split whose sequences have one sample each"""
        self.folder, self.split, self.most = folder, split, most
        empty = not (folder / "tokens").stat().st_size  # which cannot be mapped
        self._tokens = np.zeros(0, np.int32) if empty else np.memmap(folder / "tokens", np.int32, "r")
        self._mask = np.zeros(0, bool) if empty else np.memmap(folder / "supervised", bool, "r")
        self._begins, self._counts = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("begins", "counts"))
        self._sequences, self._samples = (np.load(folder / f"{split}.{name}.npy") for name in ("rows", "samples"))
        self.stored = len(self)
        if most and most < self.stored:
            self._samples = self._samples[np.linspace(0, self.stored - 1, most, dtype=int)]
            self._sequences = np.arange(most + 1)

    def __len__(self) -> int:
        return len(self._sequences) - 1

    def __getitem__(self, index: int) -> TokenSequence:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        parts = [slice(self._begins[s], self._begins[s + 1]) for s in self.samples_of(index)]
        tokens = np.concatenate([self._tokens[part] for part in parts])
        mask = np.concatenate([self._mask[part] for part in parts])
        return {
            "input_ids": tokens,
            "labels": np.where(mask, tokens, IGNORED).astype(np.int64),
            "lengths": np.array([part.stop - part.start for part in parts], dtype=np.int64),
        }

    def samples_of(self, index: int) -> np.ndarray:
        """Return the numbers in the store of the samples that make up a sequence; int64 (samples,)."""
        return self._samples[self._sequences[index] : self._sequences[index + 1]]

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

    def __getstate__(self) -> tuple[Path, str, int | None]:  # a worker process maps the files anew
        return self.folder, self.split, self.most

    def __setstate__(self, state: tuple[Path, str, int | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]
