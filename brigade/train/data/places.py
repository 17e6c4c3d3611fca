"""Where a row's samples stand in the files or data sets that they come from, for whoever has to look at them."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...errors import UserError
from ..recipe.flags import Settings
from ..recipe.schema import DataSection, Source
from .builtin import BUILT_IN, TRAIN
from .layout import paths_of
from .rows import Where


def files_of(data: DataSection) -> list[str]:
    """The training files of all sources, in order, and last the built-in one. Raises UserError where a name has none."""
    sources: Sequence[Source] = data.datasets or [data]
    files = [path for source in sources if source.train_file for path in paths_of(source.train_file)]
    built_in = [TRAIN] if any(source.dataset_name == BUILT_IN for source in sources) else []
    return [str(path) for path in (*files, *built_in)]


def of(data: Any, rows: Iterable[int], settings: Settings) -> list[dict[str, Any]]:
    """{"source": file or data set, "row": line of a .jsonl file, else the number from 1} of each sample of some rows; the row is
    None where its file is gone.

    data: Prepared. It lies in the cache by its content, and its files may have had other names when it was prepared.
    """
    names: dict[str, str] = {}
    with suppress(UserError):  # they are gone
        names = dict(zip(data.facts.get("files", []), files_of(settings.recipe.data), strict=False))
    found = []
    for row in rows:
        samples, index = data.train.in_window(row) if data.train.streamed else (data.train, row)
        chunks = json.loads((samples.folder / "chunks.json").read_text())
        row_of = np.load(samples.folder / "row_of.npy", mmap_mode="r")
        for sample in samples.samples_of(index):
            number = int(row_of[sample])
            first, source, *where = chunks[bisect_right(chunks, number, key=lambda chunk: chunk[0]) - 1]
            source = names.get(source, source)
            found.append({"source": source, "row": _row(Where(source, *where), number - first)})
    return found


def _row(where: Where, number: int) -> int | None:
    try:
        return where.row(number)
    except OSError:
        return None
