"""Where the samples of a sequence stand in the files or data sets that they come from, for whoever has to look at them."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...errors import UserError
from ..recipe.data_section import DataSection, Source
from ..recipe.flags import Settings
from .builtin import BUILT_IN, TRAIN
from .layout import paths_of
from .rows import Where


def files_of(data: DataSection) -> list[str]:
    """Return the training files of all sources, in order, and last the built-in one. Raises UserError where a name has none."""
    sources: Sequence[Source] = data.datasets or [data]
    files = [path for source in sources if source.train_file for path in paths_of(source.train_file)]
    built_in = [TRAIN] if any(source.dataset_name == BUILT_IN for source in sources) else []
    return [str(path) for path in (*files, *built_in)]


def places_of(data: Any, sequences: Iterable[int], settings: Settings) -> list[dict[str, Any]]:
    """Return the place of each sample of some sequences: {"source": file or data set, "row": line of a .jsonl file, else the
    row's number from 1; None where the file is gone}.

    data: Prepared. The cache knows it by its content, and its files may have had other names when it was prepared.
    """
    names: dict[str, str] = {}
    with suppress(UserError):  # they are gone
        names = dict(zip(data.facts.get("files", []), files_of(settings.recipe.data), strict=False))
    places = []
    for number in sequences:
        samples, index = data.train.in_window(number) if data.train.streamed else (data.train, number)
        chunks = json.loads((samples.folder / "chunks.json").read_text())
        row_of = np.load(samples.folder / "row_of.npy", mmap_mode="r")
        for sample in samples.samples_of(index):
            row = int(row_of[sample])
            first, source, *where = chunks[bisect_right(chunks, row, key=lambda chunk: chunk[0]) - 1]
            source = names.get(source, source)
            places.append({"source": source, "row": _row(Where(source, *where), row - first)})
    return places


def _row(where: Where, number: int) -> int | None:
    try:
        return where.row(number)
    except OSError:
        return None
