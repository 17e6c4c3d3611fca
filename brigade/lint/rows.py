"""The first row of each file that a recipe names, where it learns which answers are better, from images, or by weights."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ..errors import UserError
from ..errors.findings import Finding
from ..train.data.images import NO_RULES, ImageReader, folder_of_images
from ..train.data.keys import WEIGHT, Row
from ..train.data.preferences import check_columns
from ..train.data.rows import BadRow
from ..train.data.samples import Text, convert, weight_of
from ..train.data.sources import files_of
from ..train.recipe.data_section import DataSection, Source
from ..train.recipe.objectives import ANSWERS, objective_of
from ..train.recipe.settings import Settings

FILES = ("train_file", "validation_file")


class _Unrendered:
    """Stands in for chat templates: what chats become is not looked at."""

    joins = last_turn_only = False

    def render(
        self,
        messages: object,
        tools: object,
        variables: object,
        learned: Sequence[bool] | None = None,
        images: object = (),
    ) -> Text:
        return Text("", [(0, 0)] * len(learned or ()))


def findings(name: str, settings: Settings) -> Iterator[Finding]:
    """Yield a finding for each file whose first row is no pair, or has no label, or has images or a weight that cannot be used.
    name: of the recipe

    What cannot be read here, and what else is wrong with rows, a run and `prepare` say: they read all of them. No image is
    fetched, nor looked for in Parquet, nor is a weight.
    """
    training, data = settings.recipe.training, settings.recipe.data
    rows = objective_of(training).rows
    sources: list[Source] = [*data.datasets] if data.datasets else [data]
    for source in sources:
        for key in FILES:
            file, rule = getattr(source, key), _rule(rows, data, source, key)
            if rule != "recipe-rows" and str(file).endswith(".parquet"):
                continue  # to read one takes pyarrow and numpy: a second
            problem = _problem(file, source, rows, rule) if file and rule else None
            if problem:
                at = "data.datasets" if data.datasets else f"data.{key}"
                about = {"objective": training.objective, "file": file}
                yield Finding.of(rule, name, at, **about, problem=problem[0], cure=problem[1])


def _rule(rows: str, data: DataSection, source: Source, key: str) -> str:
    """Return the rule that the first row of a file may break; "" for none. key: of the file"""
    if rows != ANSWERS:
        return "recipe-rows"
    if data.images:
        return "" if data.fetch_images else "recipe-images"
    return "recipe-weights" if WEIGHT in source.columns and key == "train_file" else ""


def _problem(file: str, source: Source, rows: str, rule: str) -> tuple[str, str] | None:
    """Return (problem, cure) of the first row of a file; None where there is none, or it cannot be read."""
    try:
        with suppress(UserError, OSError, StopIteration):
            chunk = next(iter(files_of(file, "").chunks()))
            _, row = next(iter(chunk.rows()))
            columns: Any = source.columns
            if isinstance(row, BadRow):
                return None
            if rule == "recipe-weights":
                weight_of(Row(row if isinstance(row, dict) else {}, columns))
            elif rule == "recipe-images":
                folder = folder_of_images(source.image_folder, chunk.where.source)
                convert(row, columns, _Unrendered(), ImageReader(NO_RULES, folder))
            else:
                check_columns(row, columns, rows)
    except BadRow as error:
        problem, cure = error.args
        return problem, cure
    return None
