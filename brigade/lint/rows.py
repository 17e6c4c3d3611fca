"""The first rows of each file that a recipe names, by the reader of a run; and whether what it names is on this machine."""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import UserError
from ..errors.findings import Finding
from ..errors.tables import Fields
from ..train.data import chat_template, preferences, samples, sources
from ..train.data.images import NO_RULES, ImageReader, folder_of_images
from ..train.data.keys import Columns, without_weight
from ..train.data.layout import NONE
from ..train.data.marks import SAID
from ..train.data.rows import BadRow, Rows
from ..train.data.samples import Text
from ..train.data.table_rows import Parquet
from ..train.host.hub import OUTPUTS
from ..train.host.urls import is_remote
from ..train.model import named
from ..train.recipe.data_section import Source
from ..train.recipe.objectives import ANSWERS, objective_of
from ..train.recipe.settings import Settings
from .files import of_error

FIRST = 20  # rows of a file that are read
FILES = ("train_file", "validation_file")
_VARIABLE = re.compile(r"\$\{\w+\}|\$[A-Z_]{2,}")


class _Unrendered:
    """Stands in for chat templates: what chats become is not looked at."""

    def __init__(self, joins: bool = False, last_turn_only: bool = False) -> None:
        self.joins, self.last_turn_only = joins, last_turn_only

    def render(self, chat: object, learned: Sequence[bool] | None = None, images: object = ()) -> Text:
        return Text("", [(0, 0)] * len(learned or ()))


def findings(name: str, settings: Settings) -> Iterator[Finding]:
    """Yield what a run would refuse before it tokenises, as far as this machine alone can tell, and columns that nobody reads.
    name: of the recipe

    Data sets of the Hub and of the datasets library are not read, and no image is fetched, nor looked for in Parquet. A run and
    `prepare` read all rows, and render them.
    """
    variables = list(_variables(name, settings.recipe.model_dump()))
    yield from variables
    if variables:  # what they stand for is not there either
        return
    try:
        chat_template.file_of(settings)
        sources.check_files(settings)
        yield from _absent(name, settings)
        for source, place in sources.each(settings):
            for key in FILES:
                file = getattr(source, key)
                if file and not is_remote(file):
                    yield from _of_file(name, settings, source, key, sources.files_of(file, place(key)))
    except UserError as error:
        yield of_error("recipe-data", error, name, settings.recipe_path)


def _absent(name: str, settings: Settings) -> Iterator[Finding]:
    """Yield a finding for each model that is not here. What lies below outputs/ is written by a command before the run."""
    for place, path in named.absent_models(settings):
        if str(Path(path)).startswith(OUTPUTS):
            rule, problem, cure = "recipe-output", f"there is no {path} yet", "run what writes it before this recipe"
        else:
            rule, problem, cure = "recipe-data", f"there is no {path}", "name a directory, or a model on the Hub"
        yield of_error(rule, UserError(place, problem, cure), name, settings.recipe_path)


def _variables(name: str, recipe: Fields) -> Iterator[Finding]:
    """Yield a finding for each text in a recipe that a shell would have replaced."""
    for section, keys in recipe.items():
        for key, value in keys.items():
            found = _VARIABLE.search(str(value))
            if found:
                yield Finding.of("recipe-variable", name, f"{section}.{key}", variable=found[0])


def _of_file(name: str, settings: Settings, source: Source, key: str, rows: Rows) -> Iterator[Finding]:
    """Yield what is to be said of a file's first rows. Raises UserError where it cannot be read. key: one of FILES"""
    data = settings.recipe.data
    if data.images and (data.fetch_images or isinstance(rows, Parquet)):
        return
    columns: Columns = dict(source.columns)  # type: ignore[arg-type]
    columns = columns if key == "train_file" else without_weight(columns)
    rendered = _Unrendered(data.chat_template == NONE, data.train_on_last_turn_only)
    kind = objective_of(settings.recipe.training).rows
    at = "data.datasets" if data.datasets else f"data.{key}"
    chunk = next(rows.chunks(), None)
    if chunk is None:
        return
    images = ImageReader(NO_RULES, folder_of_images(source.image_folder, chunk.where.source)) if data.images else None
    unread: dict[str, None] = {}
    for number, row in itertools.islice(chunk.rows(), FIRST):
        try:
            if isinstance(row, BadRow):
                raise row
            if kind == ANSWERS:
                text = samples.convert(row, columns, rendered, images)
            else:
                text = preferences.convert(row, columns, rendered, kind)[0]
        except BadRow as error:
            if not data.skip_bad_rows:
                values = dict(zip(("problem", "cure"), error.args, strict=True))
                yield Finding.of("recipe-rows", name, at, row=chunk.where.place(number), **values)
                return
        else:
            unread |= dict.fromkeys(words for words in (text.unread if text else ()) if words not in SAID)
    if unread:
        yield Finding.of("recipe-unread", name, at, file=rows.place, unread=", ".join(unread))
