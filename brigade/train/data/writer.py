"""The store that store.py reads, written: samples are appended, and a split says which items make up each sequence.

An item is what a split chooses, mixes and packs: a sample, or of PAIRS two samples that follow each other.
"""

import json
from pathlib import Path

import numpy as np

from ...errors.tables import Fields
from ..recipe.objectives import ANSWERS
from .encoded import BAD, COUNTED, CUT, EMPTY, MOST_LOST, SAMPLE, SPLIT, Encoded
from .image_store import ImageWriter
from .kinds import KINDS
from .packing import Sequences


class Writer:
    """Appends samples to the store in a folder; `close` makes it readable. rows: ANSWERS, PAIRS or JUDGED; images: whether rows
    may have some"""

    def __init__(self, folder: Path, rows: str = ANSWERS, images: bool = False) -> None:
        self.folder, self.kind = folder, KINDS[rows]
        self.samples, self._rows = 0, 0
        self._tokens = (folder / "tokens").open("wb")
        self._mask = (folder / "supervised").open("wb")
        self._parts = [np.zeros(0, SAMPLE)]
        self._chunks: list[tuple[int, str, int, bool]] = []
        self._unread: dict[tuple[str, ...], int] = {(): 0}
        self._images = ImageWriter(folder) if images else None

    def add(self, part: Encoded) -> None:
        part.tokens.tofile(self._tokens)
        part.supervised.tofile(self._mask)
        if self._images:
            self._images.add(part.images)
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

    @property
    def items(self) -> int:
        """How many items there are."""
        return self.samples // self.kind.samples

    def of_items(self, items: np.ndarray) -> np.ndarray:
        """Return the samples of items, as table() has them; shape (items, samples of each)."""
        return self.table().reshape(-1, self.kind.samples)[items]

    def facts(self, items: np.ndarray, dropped: np.ndarray) -> Fields:
        """Return figures of these items, and of rows that were dropped beside them; for each key that nobody read, in how many
        rows it stands; and those of the kind.

        dropped: int64 (rows, 2), of each its fate and the max_length that would keep it, as Encoded has them
        """
        by_item = self.of_items(items)
        chosen = by_item.ravel()
        rows = np.bincount(chosen["unread"], minlength=len(self._unread)).tolist()
        unread: dict[str, int] = {}
        for names, count in zip(self._unread, rows, strict=True):
            unread |= {name: unread.get(name, 0) + count for name in names if count}
        fates = np.concatenate([by_item["fate"].max(axis=1, initial=0), dropped[:, 0]])
        cut, split, empty, bad = (int((fates == fate).sum()) for fate in (CUT, SPLIT, EMPTY, BAD))
        return {
            **{name: int(chosen[name].sum()) for name in COUNTED},
            "samples": len(items),
            "tokens": int(chosen["length"].sum()),
            "supervised": int(chosen["supervised"].sum()),
            "longest": int(chosen["length"].max(initial=0)),
            "cut": cut,
            "split": split,
            "dropped": len(dropped) - empty - bad,
            "enough": _enough(dropped[~np.isin(dropped[:, 0], (EMPTY, BAD)), 1], len(items)),
            "empty": empty,
            "skipped": bad,
            "unread": unread,
            **self._of_images(items),
            **_of_weights(chosen),
            **self.kind.figures(by_item),
        }

    def _of_images(self, items: np.ndarray) -> dict[str, int]:
        """Return how many images these items have, how many of them have some, and how many images are scaled before the
        processor sees them; {} where rows have none."""
        if not self._images:
            return {}
        counts, scaled = self._images.counts()[items], self._images.scaled()[items]
        return {"images": int(counts.sum()), "with_images": int((counts > 0).sum()), "scaled": int(scaled.sum())}

    def shared(self, some: np.ndarray, others: np.ndarray) -> int:
        """Return how many of some items are, token for token, among others."""
        which = np.arange(1, self.kind.samples + 1)  # else a pair the wrong way round would be the same
        ours, theirs = (self.of_items(items)["digest"] @ which for items in (some, others))
        return int(np.isin(ours, theirs).sum())

    def split(self, name: str, sequences: Sequences) -> None:
        """Store which items make up each sequence of a split."""
        sequences = sequences.of_items(self.kind.samples)
        np.save(self.folder / f"{name}.rows.npy", np.concatenate([[0], np.cumsum(sequences.sizes)]))
        np.save(self.folder / f"{name}.samples.npy", sequences.samples)

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        if self._images:
            self._images.close()
        table = self.table()
        np.save(self.folder / "begins.npy", np.concatenate([[0], np.cumsum(table["length"])]))
        np.save(self.folder / "counts.npy", np.ascontiguousarray(table["supervised"]))
        np.save(self.folder / "row_of.npy", np.ascontiguousarray(table["row"]))
        if (table["weight"] != 1).any():
            np.save(self.folder / "weights.npy", np.ascontiguousarray(table["weight"]))
        for name in self.kind.stored:
            np.save(self.folder / f"{name}.npy", table[name].astype(bool))
        (self.folder / "chunks.json").write_text(json.dumps(self._chunks))


def _enough(needed: np.ndarray, kept: int) -> int:
    """Return the smallest max_length with which at most MOST_LOST of the samples are dropped; 0 where none has.

    needed: of each dropped one the max_length that keeps it, 0: there is none; kept: how many are not dropped
    """
    longest_first = np.sort(np.where(needed > 0, needed, np.inf))[::-1]
    enough = longest_first[int(MOST_LOST * (len(needed) + kept)) :]  # the others may go
    return int(enough[0]) if len(enough) and np.isfinite(enough[0]) else 0


def _of_weights(samples: np.ndarray) -> Fields:
    """Return the smallest and largest weight of samples, and how many weigh 0; {} where all weigh 1."""
    weights = samples["weight"]
    if not (weights != 1).any():
        return {}
    return {"weights": [float(weights.min()), float(weights.max())], "weightless": int((weights == 0).sum())}
