"""The store that store.py reads, written: samples are appended, and a split says which of them make up each sequence."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from .encoded import BAD, COUNTED, CUT, EMPTY, SAMPLE, SPLIT, Encoded
from .packing import Sequences


class Writer:
    """Appends samples to the store in a folder; `close` makes it readable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.samples, self._rows = folder, 0, 0
        self._tokens = (folder / "tokens").open("wb")
        self._mask = (folder / "supervised").open("wb")
        self._parts = [np.zeros(0, SAMPLE)]
        self._chunks: list[tuple[int, str, int, bool]] = []
        self._unread: dict[tuple[str, ...], int] = {(): 0}

    def add(self, part: Encoded) -> None:
        part.tokens.tofile(self._tokens)
        part.supervised.tofile(self._mask)
        self._chunks.append((self._rows, *part.where))
        samples = part.samples.copy()
        samples["row"] += self._rows
        known = [self._unread.setdefault(names, len(self._unread)) for names in part.unread]
        samples["unread"] = np.array(known)[samples["unread"]]
        self._parts.append(samples)
        self.samples, self._rows = self.samples + len(samples), self._rows + part.rows

    def table(self) -> np.ndarray:
        """Return all samples, as SAMPLE; `row` counts through all parts, and `unread` is an index of the writer's own."""
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def facts(self, samples: np.ndarray, dropped: np.ndarray) -> dict[str, Any]:
        """Return figures of these samples, and of rows that were dropped beside them; for each key that nobody read, in how many
        rows it stands.

        dropped: int64 (rows,), the fate of each
        """
        chosen = self.table()[samples]
        rows = np.bincount(chosen["unread"], minlength=len(self._unread)).tolist()
        unread: dict[str, int] = {}
        for names, count in zip(self._unread, rows, strict=True):
            unread |= {name: unread.get(name, 0) + count for name in names if count}
        fates = np.concatenate([chosen["fate"], dropped])
        cut, split, empty, bad = (int((fates == fate).sum()) for fate in (CUT, SPLIT, EMPTY, BAD))
        return {
            **{name: int(chosen[name].sum()) for name in COUNTED},
            "samples": len(samples),
            "tokens": int(chosen["length"].sum()),
            "supervised": int(chosen["supervised"].sum()),
            "longest": int(chosen["length"].max(initial=0)),
            "cut": cut,
            "split": split,
            "dropped": len(dropped) - empty - bad,
            "empty": empty,
            "skipped": bad,
            "unread": unread,
        }

    def shared(self, some: np.ndarray, others: np.ndarray) -> int:
        """Return how many of some samples are, token for token, among others."""
        digests = self.table()["digest"]
        return int(np.isin(digests[some], digests[others]).sum())

    def split(self, name: str, sequences: Sequences) -> None:
        """Store which samples make up each sequence of a split."""
        np.save(self.folder / f"{name}.rows.npy", np.concatenate([[0], np.cumsum(sequences.sizes)]))
        np.save(self.folder / f"{name}.samples.npy", sequences.samples)

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        table = self.table()
        np.save(self.folder / "begins.npy", np.concatenate([[0], np.cumsum(table["length"])]))
        np.save(self.folder / "counts.npy", np.ascontiguousarray(table["supervised"]))
        np.save(self.folder / "row_of.npy", np.ascontiguousarray(table["row"]))
        (self.folder / "chunks.json").write_text(json.dumps(self._chunks))
