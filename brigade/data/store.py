"""Samples in flat memory-mapped arrays: tokens end to end, who is supervised, where each begins, and what makes up a row.

A row is one sequence of global_batch_size: a sample, or the samples packed into it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .encode import ABOUT, BAD, CUT, EMPTY, SPLIT, Encoded

IGNORED = -100  # the label that torch's cross-entropy and Transformers skip

Row = dict[str, np.ndarray]


class Writer:
    """Appends samples to a folder's store; `close` makes it readable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.samples, self._rows = folder, 0, 0
        self._tokens = (folder / "tokens").open("wb")
        self._mask = (folder / "supervised").open("wb")
        self._lengths: list[np.ndarray] = []
        self._supervised: list[np.ndarray] = []
        self._fates: list[np.ndarray] = []
        self._of: list[np.ndarray] = []
        self._about: list[np.ndarray] = []

    def add(self, part: Encoded) -> None:
        self._fates.append(part.fates)
        part.tokens.astype(np.int32, copy=False).tofile(self._tokens)
        part.supervised.tofile(self._mask)
        self._of.append(self._rows + part.of)
        self._about.append(part.about)
        self.samples, self._rows = self.samples + len(part.lengths), self._rows + part.rows
        if len(part.lengths):
            self._lengths.append(part.lengths)
            begins = np.concatenate([[0], np.cumsum(part.lengths)[:-1]])
            self._supervised.append(np.add.reduceat(part.supervised.astype(np.int64), begins))

    def lengths(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._lengths])

    def facts(self, samples: np.ndarray, dropped: np.ndarray) -> dict[str, int]:
        """Figures of these samples, and of rows that were dropped beside them (fates, one a row)."""
        nothing = np.zeros(0, dtype=np.int64)
        lengths, supervised, fates = (
            np.concatenate([nothing, *parts])[samples] for parts in (self._lengths, self._supervised, self._fates)
        )
        cut, split = (int((fates == fate).sum() + (dropped == fate).sum()) for fate in (CUT, SPLIT))
        empty, bad = (int((dropped == fate).sum()) for fate in (EMPTY, BAD))
        about = dict(zip(ABOUT, self._all_about()[samples].sum(axis=0).tolist(), strict=True))
        return {
            **{name: about[name] for name in ABOUT[:-1]},
            "samples": len(samples),
            "tokens": int(lengths.sum()),
            "supervised": int(supervised.sum()),
            "longest": int(lengths.max(initial=0)),
            "cut": cut,
            "split": split,
            "dropped": len(dropped) - empty - bad,
            "empty": empty,
            "skipped": bad,
        }

    def _all_about(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, len(ABOUT)), dtype=np.int64), *self._about])

    def shared(self, some: np.ndarray, others: np.ndarray) -> int:
        """How many of some samples are, token for token, among others."""
        digests = self._all_about()[:, -1]
        return int(np.isin(digests[some], digests[others]).sum())

    def rows(self) -> np.ndarray:
        """The row that each sample is of, by its number among all that were added; int64 (samples,)."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._of])

    def split(self, name: str, rows: list[list[int]]) -> None:
        """Store which samples make up each row of a split."""
        np.save(self.folder / f"{name}.rows.npy", np.cumsum([0, *map(len, rows)]))
        np.save(self.folder / f"{name}.samples.npy", np.array([s for row in rows for s in row], dtype=np.int64))

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        np.save(self.folder / "begins.npy", np.concatenate([[0], np.cumsum(self.lengths())]))
        np.save(self.folder / "counts.npy", np.concatenate([np.zeros(0, dtype=np.int64), *self._supervised]))


class Samples(Sequence[Row]):
    """The rows of one split, read as they are asked for.

    [i] -> {"input_ids": int32 (tokens,), "labels": int64 (tokens,), IGNORED where unsupervised and at the begin of each
    sample, "lengths": int64 (samples of the row,)}
    """

    streamed = False

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        self._tokens = (
            np.memmap(folder / "tokens", np.int32, "r") if (folder / "tokens").stat().st_size else np.zeros(0)
        )
        self._mask = np.memmap(folder / "supervised", bool, "r") if len(self._tokens) else np.zeros(0, dtype=bool)
        self._begins, self._counts = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("begins", "counts"))
        self._rows, self._samples = (np.load(folder / f"{split}.{name}.npy") for name in ("rows", "samples"))

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        samples = self._samples[self._rows[index] : self._rows[index + 1]]
        parts = [slice(self._begins[s], self._begins[s + 1]) for s in samples]
        tokens = np.concatenate([self._tokens[part] for part in parts])
        mask = np.concatenate([self._mask[part] for part in parts])
        return {
            "input_ids": tokens,
            "labels": np.where(mask, tokens, IGNORED).astype(np.int64),
            "lengths": np.array([part.stop - part.start for part in parts], dtype=np.int64),
        }

    def supervised(self) -> np.ndarray:
        """Supervised tokens of each row; int64 (rows,)."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(np.asarray(self._counts)[self._samples], self._rows[:-1])

    def lengths(self) -> np.ndarray:
        """Tokens of each row; int64 (rows,)."""
        begins = np.asarray(self._begins)
        return np.add.reduceat((begins[1:] - begins[:-1])[self._samples], self._rows[:-1])

    def __getstate__(self) -> tuple[Path, str]:  # a worker process maps the files anew
        return self.folder, self.split

    def __setstate__(self, state: tuple[Path, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]
