"""The images of a row: in parts of its messages, or in a column whose places in the texts <image> marks. Imports no torch."""

import json
from collections.abc import Iterable
from typing import Any

from ...errors import shown
from .images import DROP, MARK, ImageReader, ImageSource
from .keys import IMAGES, Row, says_nothing
from .rows import BadRow

Message = dict[str, Any]

PLACE = "<image>"  # of LLaVA, LLaMA-Factory and ms-swift
ASKING = ("user", "tool")  # roles whose turns may have images
TYPES = ("image", "image_url")  # of parts
GIVEN = ("image", "image_url", "path", "url", "base64", "data")  # keys of parts under which an image may stand
# Keys by which other tools scale one image (Qwen's), and not all of them alike.
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
WRITE = 'write {"type": "image", "image": PATH}, or a column images and <image> for each in the texts'


class RowImages:
    """The images of one row, in the order of their places. whole: those found so far

    Texts go through text(), parts through part(), in the order in which they stand in the row; then finish().
    """

    def __init__(self, row: Row, reader: ImageReader) -> None:
        """Raises BadRow for a column that holds no images."""
        self.reader, self.whole = reader, list[ImageSource]()
        self.column, self.given = _column(row)
        self._left = iter(self.given)
        self._places = 0
        self._elsewhere = ""  # the role of a turn that is no question, and spells a place out

    def text(self, text: str, role: str) -> str:
        """Return a text whose places for images have become MARKs. role: of the turn, by our names"""
        if MARK in text:
            raise BadRow(f"a text has the character U+{ord(MARK):04X}, which stands for images here", "remove it")
        if not self.given or PLACE not in text:
            return text
        if role not in ASKING:
            self._elsewhere = self._elsewhere or role
            return text
        first, *others = text.split(PLACE)
        return first + "".join(self._next() + other for other in others)

    def part(self, part: dict[str, Any], role: str) -> tuple[str, set[str]]:
        """Return the MARK for a part of a message that is an image, and the keys of it that were read. Raises BadRow for an image
        in another turn than a question's, and for one that cannot be read."""
        if role not in ASKING:
            problem = f"an image in a {role!r} turn: a model reads images, and writes none"
            raise BadRow(problem, "put it into a user's turn, or drop the row")
        if sizes := [key for key in SIZES if not says_nothing(part.get(key))]:
            problem = f"a part of type {part['type']!r} sets {sizes[0]}, and all images are scaled alike"
            raise BadRow(problem, "remove it: max_pixels and min_pixels of the recipe's data section scale images")
        keys = [key for key in GIVEN if not says_nothing(part.get(key))]
        if len(keys) > 1:
            raise BadRow(f"a part of type {part['type']!r} has both {keys[0]!r} and {keys[1]!r}", "keep one of them")
        if not keys:
            return self._next(), set(GIVEN)
        self.whole.append(self.reader.read(part[keys[0]]))
        return MARK, set(GIVEN)

    def _next(self) -> str:
        """Return the MARK for a place that takes the next image of the column, if there is one: finish() counts."""
        self._places += 1
        value = next(self._left, None)
        if value is not None:
            self.whole.append(self.reader.read(value))
        return MARK

    def finish(self, messages: list[Message]) -> list[Message]:
        """Return the messages of the row, with the column's images before the first user's text where nothing says where they
        stand. Raises BadRow where places and images are not equally many."""
        if self.given and not self._places and not self._elsewhere and not self.whole:
            first = next((number for number, turn in enumerate(messages) if turn["role"] == "user"), None)
            if first is None:
                raise BadRow(f"column {self.column!r} has images, and there is no user's turn for them", DROP)
            self.whole = [self.reader.read(value) for value in self.given]
            turn = messages[first] | {"content": MARK * len(self.whole) + messages[first]["content"]}
            messages = [*messages[:first], turn, *messages[first + 1 :]]
        elif self._places != len(self.given):
            places = f"places for images in users' turns ({PLACE}, or a part without an image): {self._places:,}"
            images = f"images in column {self.column!r}: {len(self.given):,}" if self.column else "no column has images"
            elsewhere = f"; {PLACE} in a {self._elsewhere!r} turn is none" if self._elsewhere else ""
            cure = "give as many places as images, or no places: then all come first"
            raise BadRow(f"{places}; {images}{elsewhere}", cure)
        if sum(turn["content"].count(MARK) for turn in messages) != len(self.whole):
            raise BadRow(f"a text has the character U+{ord(MARK):04X}, which stands for images here", "remove it")
        return messages

    def without_places(self, text: str) -> str:
        """Return a text without its places for images, which some tokenizers have as a special token."""
        return text.replace(PLACE, "") if self.given else text

    def refuse_any(self, kind: str) -> None:
        """Raise BadRow where the row has images and is no chat. kind: what it is, in words"""
        if self.given or self.whole:
            raise BadRow(f"it has images, and {kind} has no place for them", WRITE)


def _column(row: Row) -> tuple[str, list[Any]]:
    """Return the source's name of the column with the row's images, and what it holds; "" and [] where there is none."""
    there = [key for key in IMAGES if not says_nothing(row.get(key))]
    if len(there) > 1:
        names = " and ".join(repr(row.name(key)) for key in there)
        raise BadRow(f"both columns {names} hold images", "name the one that is meant, and ignore the other in columns")
    if not there:
        return "", []
    value = row.get(there[0])
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list, as CSV holds it
        value = _list_of(value)
    values = value if isinstance(value, list) else [value]
    if (bad := next((each for each in values if not _may_be_image(each)), values)) is not values:
        name = row.name(there[0])
        raise BadRow(
            f"column {name!r} holds {shown(bad)}, which is no image", "give paths, or lists of them; or ignore it"
        )
    return row.name(there[0]), values


def _list_of(text: str) -> Any:
    """Return the list that a text is in JSON, or the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _may_be_image(value: Any) -> bool:
    if isinstance(value, dict):
        return any(not says_nothing(value.get(key)) for key in ("bytes", "path", "url"))
    return isinstance(value, (str, bytes)) and bool(value)


def in_parts(content: str) -> list[dict[str, str]]:
    """Return a content with MARKs as the parts that chat templates read; a text of its own is one part."""
    return list(_parts(content)) or [{"type": "text", "text": ""}]


def _parts(content: str) -> Iterable[dict[str, str]]:
    for number, text in enumerate(content.split(MARK)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}
