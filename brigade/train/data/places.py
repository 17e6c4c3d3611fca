"""Where the samples of a sequence stand in the files or data sets that they come from, for whoever has to look at them."""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ...errors.tables import Fields
from ..recipe.data_section import DataSection
from ..recipe.settings import Settings
from .builtin import BUILT_IN, TRAIN
from .data_files import paths_of
from .images import LostImage
from .rows import Where


def files_of(data: DataSection) -> list[str]:
    """Return the training files of all sources, in order, and last the built-in one. Raises UserError where a name has none."""
    files = [path for source in data.sources if source.train_file for path in paths_of(source.train_file)]
    built_in = [TRAIN] if any(source.dataset_name == BUILT_IN for source in data.sources) else []
    return [str(path) for path in (*files, *built_in)]


def places_of(data: Any, sequences: Iterable[int], settings: Settings) -> list[Fields]:
    """Return the place of each sample of some sequences: {"source": file or data set, "row": line of a .jsonl file, else the
    row's number from 1; None where the file is gone}.

    data: Prepared. The cache knows it by its content, and its files may have had other names when it was prepared.
    """
    names, places = _names_now(data, settings), []
    for number in sequences:
        samples, index = data.train.in_window(number) if data.train.streamed else (data.train, number)
        find = _finder(samples.folder, names)
        for where, row in map(find, samples.samples_of(index)):
            places.append({"source": where.source, "row": _row(where, row)})
    return places


def name_row(error: BaseException, data: Any, settings: Settings) -> UserError | None:
    """Return the error of an image that was lost with the row that names the image; None for any other error.

    data: Prepared, without streaming
    """
    if not isinstance(error, LostImage) or error.sample is None:
        return None
    where, row = _finder(data.folder, _names_now(data, settings))(error.sample)
    place = where.source
    with suppress(OSError):
        place = where.place(row)
    return UserError(f"{place}: image {error.place}", error.problem, error.cure, error.whose)


def _names_now(data: Any, settings: Settings) -> dict[str, str]:
    """Return the name of each file when it was prepared -> the one by which the recipe names it now; {} where they are gone."""
    with suppress(UserError):
        return dict(zip(data.facts.get("files", []), files_of(settings.recipe.data), strict=False))
    return {}


def _finder(folder: Path, names: Mapping[str, str]) -> Callable[[int], tuple[Where, int]]:
    """Return what finds the place of a sample in the store of a folder: (its chunk, its row's number there)."""
    chunks = json.loads((folder / "chunks.json").read_text())
    row_of = np.load(folder / "row_of.npy", mmap_mode="r")

    def find(sample: int) -> tuple[Where, int]:
        row = int(row_of[sample])
        first, source, *where = chunks[bisect_right(chunks, row, key=lambda chunk: chunk[0]) - 1]
        return Where(names.get(source, source), *where), row - first

    return find


def _row(where: Where, number: int) -> int | None:
    try:
        return where.row(number)
    except OSError:
        return None
