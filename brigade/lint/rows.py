"""The first row of each file that a recipe names, where the recipe learns which answers are better."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..errors import UserError
from ..errors.findings import Finding
from ..train.data.preferences import check_columns
from ..train.data.rows import BadRow
from ..train.data.sources import files_of
from ..train.recipe.data_section import Source
from ..train.recipe.flags import Settings
from ..train.recipe.objectives import ANSWERS, objective_of

FILES = ("train_file", "validation_file")


def findings(name: str, settings: Settings) -> Iterator[Finding]:
    """Yield a finding for each file whose first row is no pair, or has no label. name: of the recipe

    What cannot be read here, and what else is wrong with rows, a run and `prepare` say: they read all of them.
    """
    training, data = settings.recipe.training, settings.recipe.data
    rows = objective_of(training).rows
    if rows == ANSWERS:
        return
    sources: list[Source] = [*data.datasets] if data.datasets else [data]
    for source in sources:
        for key in FILES:
            file = getattr(source, key)
            if file and (problem := _problem(file, source, rows)):
                at = "data.datasets" if data.datasets else f"data.{key}"
                about = {"objective": training.objective, "file": file}
                yield Finding.of("recipe-rows", name, at, **about, problem=problem[0], cure=problem[1])


def _problem(file: str, source: Source, rows: str) -> tuple[str, str] | None:
    """Return (problem, cure) of the first row of a file; None where there is none, or it cannot be read."""
    try:
        with suppress(UserError, OSError, StopIteration):
            _, row = next(iter(next(iter(files_of(file, "").chunks())).rows()))
            if not isinstance(row, BadRow):
                columns: Any = source.columns
                check_columns(row, columns, rows)
    except BadRow as error:
        problem, cure = error.args
        return problem, cure
    return None
