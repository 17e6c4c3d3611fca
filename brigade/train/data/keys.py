"""The keys of a row, of its messages and of their parts: which were read, and whether others are refused or counted."""

import math
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from ...errors import shown
from ...errors.tables import Fields
from ..recipe.files import read_yaml
from ..recipe.objectives import ANSWERS
from .rows import BadRow

Columns = dict[str, Any]  # data.columns: our names -> a source's own; IGNORE -> those that are left out on purpose
IGNORE = "ignore"
# of a row's loss: read where data.columns names it, for sets have such columns for other reasons, too
WEIGHT = "weight"
IMAGES = ("images", "image")  # columns with images, which are read with data.images
# White space, and characters that show nothing: without a width, soft hyphens, fillers of Hangul and Braille.
_BLANK = re.compile(
    r"[\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]*"
)


# How tables and programs print a value that is missing: pandas, Python, SQL and JavaScript.
_MISSING = frozenset(("nan", "NaN", "NAN", "<NA>", "NaT", "None", "null", "NULL", "N/A", "#N/A", "undefined"))


class _Known:
    """The keys of one part of known_keys.yaml: the values that are refused (None: all) and why."""

    def __init__(self, entries: list[Fields]) -> None:
        self.entries = {key: entry for entry in entries for key in entry["keys"]}

    def refuse(self, content: Fields, where: str, but: Container[str] = ()) -> None:
        """Raise BadRow for the first key of `content` that is known to mean something.

        where: begins the message; but: keys that were read
        """
        if self.entries.keys().isdisjoint(content):
            return
        for key, value in content.items():
            if key not in self.entries or key in but:
                continue
            entry = self.entries[key]
            values = entry.get("values")
            if says_nothing(value) or (values and not any(type(v) is type(value) and v == value for v in values)):
                continue
            held = f" is {shown(value)}, which" if values else ""
            raise BadRow(f"{where} {key!r}{held} {entry['problem']}", entry["cure"].replace("KEY", key))


_TABLE = read_yaml(Path(__file__).with_name("known_keys.yaml"))
ROWS, PAIRS, MESSAGES, PARTS = (_Known(_TABLE[name]) for name in ("rows", "pairs", "messages", "parts"))


def _read_by(rows: str, images: bool) -> set[str]:
    readers = {rows, *(["images"] if images else [])}
    return {key for key, entry in ROWS.entries.items() if readers.intersection(entry.get("read_by", ()))}


def says_nothing(value: object) -> bool:
    """Whether a value is as good as absent, for sets give all rows the same columns. 0 and false do say something."""
    return value is None or value in ("", [], {})


def blank(text: str) -> bool:
    """Whether a text has no visible character."""
    return _BLANK.fullmatch(text) is not None


def names_of(columns: Columns) -> set[str]:
    """Return the source's names in data.columns, without those to ignore."""
    return {name for key, name in columns.items() if key != IGNORE}


def without_weight(columns: Columns) -> Columns:
    """Return data.columns for rows that are held out, whose weights nobody reads."""
    ignored = columns.get(IGNORE, ())
    others = {key: name for key, name in columns.items() if key != WEIGHT}
    if len(others) == len(columns):
        return columns
    return others | {IGNORE: [*([ignored] if isinstance(ignored, str) else ignored), columns[WEIGHT]]}


class Row:
    """A row's columns, by our names.

    rows: what it is read as, ANSWERS, PAIRS or JUDGED; images: whether IMAGES are read
    said: what readers have to say of the row, in words
    """

    def __init__(self, content: Fields, columns: Columns, rows: str = ANSWERS, images: bool = False) -> None:
        ignored = columns.get(IGNORE, ())
        ignored = (ignored,) if isinstance(ignored, str) else ignored
        self.columns = columns
        self.content = {key: value for key, value in content.items() if key not in ignored} if ignored else content
        self.asked, self.said = set[str](), set[str]()
        nulls = [name for name, value in self.content.items() if isinstance(value, float) and math.isnan(value)]
        self.content = {**self.content, **dict.fromkeys(nulls)} if nulls else self.content  # pandas writes null so
        named = names_of(columns)
        self._counted = named.union(nulls)  # where they are null; elsewhere null is as good as absent
        ROWS.refuse(self.content, "column", but=named | _read_by(rows, images))

    def name(self, key: str) -> str:
        """Return the source's own name of a column."""
        return str(self.columns.get(key, key))

    def has(self, key: str) -> bool:
        """Whether there is a column by our name. One that data.columns names for something else is not."""
        name = self.name(key)
        return name in self.content and (key in self.columns or name not in names_of(self.columns))

    def get(self, key: str) -> Any:
        """Return the value of a column by our name, which then counts as read; None where there is none."""
        if not self.has(key):
            return None
        name = self.name(key)
        self.asked.add(name)
        if name in self._counted and self.content[name] is None:
            self.said.add(f"null in column {name!r}, read as no value")
        return self.content[name]

    def there(self, keys: Iterable[str]) -> str | None:
        """Return the first of these columns that holds something, else the first that there is, and those before others that
        data.columns names; None where there is none."""
        names = sorted((key for key in keys if self.has(key)), key=lambda key: key not in self.columns)
        return next((key for key in names if not says_nothing(self.content[self.name(key)])), next(iter(names), None))

    def refuse_leftover(self) -> None:
        """Raise BadRow for a column that is known to mean something, and that nobody asked for."""
        ROWS.refuse(self.content, "column", but=self.asked | names_of(self.columns))

    def _missing(self) -> Iterator[str]:
        """Yield in words which texts that were asked for are what tables print of a missing value. They may be meant."""
        for name in self.asked & self.content.keys():
            value = self.content[name]
            turns = [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else ()
            texts = [value, *(turn[key] for turn in turns for key in ("content", "value") if key in turn)]
            for text in texts:
                if isinstance(text, str) and text.strip() in _MISSING:
                    yield f"{text.strip()!r} as a text of column {name!r} (tables print missing values so), read as letters"

    def unread(self) -> list[str]:
        """Return the columns that hold something and that nobody asked for."""
        return [key for key, value in self.content.items() if key not in self.asked and not says_nothing(value)]

    def notes(self) -> set[str]:
        """Return all that is to be said of the row, in words."""
        return self.said | {f"column {name!r}" for name in self.unread()} | {*self._missing()}
