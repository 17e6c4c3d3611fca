"""The images of a row: in parts of its messages, or in a column whose places in the texts are marked. Imports no torch."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from ...errors.tables import Document, Fields
from . import image_columns
from .image_places import PLACE, may_have_places, number_in, place_of, unknown_place
from .images import DROP, MARK, ImageReader, ImageSource
from .keys import Row, says_nothing
from .rows import BadRow, Message

ASKING = ("user", "tool")  # roles whose turns may have images
TYPES = ("image", "image_url")  # of parts
GIVEN = ("image", "image_url", "path", "url", "base64", "data")  # keys of parts under which an image may stand
# Of a part: which of the column's images it is, counted from 0 (Hugging Face's sets for LLaVA).
INDICES = ("index", "image_index", "image_idx", "idx")
# Keys by which other tools scale one image (Qwen's), and not all of them alike.
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
WRITE = 'write {"type": "image", "image": PATH}, or a column images and <image> for each in the texts'
BOXES = "boxes or points in texts, which are not scaled where their images are"
_NUMBER = r"\s*-?\d+(?:\.\d+)?\s*"
# Qwen's <|box_start|> and bbox_2d, InternVL's <box>, PaliGemma's <loc0123>, Kosmos' <patch_index_0044>, Molmo's <point x=...>.
_MARKS = (
    r"<\|?(?:bbox|box|quad|point)(?:_start)?\|?>|<loc_?\d+>|<patch_index_\d+>|<points? x\d*=|bbox_2d|point_2d|\bbbox\b"
)
_FOUR = rf"[\[(]{_NUMBER}(?:,{_NUMBER}){{3}}[\])]"
_PAIRS = rf"\({_NUMBER},{_NUMBER}\)\s*,\s*\({_NUMBER},{_NUMBER}\)"
_BOX = re.compile(rf"{_MARKS}|{_FOUR}|{_PAIRS}")


class Place(NamedTuple):
    """A place for an image. own: the image that it has itself; number, at: which of the column's it takes, by a name such as
    <image_1> or by one of INDICES; none of the three: the next one; part: of the message, where it stands in one"""

    own: ImageSource | None = None
    number: int | None = None
    at: int | None = None
    part: Document = {}


class RowImages:
    """The images of one row. whole: all of them, in the order of their places, once finish() is done

    Texts go through text(), parts through part(), in the order in which they stand in the row; then finish().
    """

    def __init__(self, row: Row, reader: ImageReader) -> None:
        """Raises BadRow for a column that holds no images."""
        self.row, self.reader, self.whole = row, reader, list[ImageSource]()
        self.column, self.given = image_columns.given(row)
        self._places, self._messages = list[Place](), list[Message]()
        self._elsewhere: tuple[str, ...] = ()  # a place in a turn that is no question, and the turn's role

    def text(self, text: str, role: str) -> str:
        """Return a text whose places for images have become MARKs. role: of the turn, by our names"""
        if MARK in text:
            raise BadRow(f"a text has the character U+{ord(MARK):04X}, which stands for images here", "remove it")
        if not may_have_places(text):
            return text
        if role in ASKING:
            return PLACE.sub(self._placed, text)
        found = PLACE.search(text) if self.given else None
        if found and found[0].startswith("<") and place_of(found):
            self._elsewhere = self._elsewhere or (found[0], role)
        return text

    def _placed(self, found: re.Match[str]) -> str:
        """Return the MARK for a place in a text; the text itself where it is none, or the row has no images for it."""
        place = place_of(found)
        if place is None or not (place[0] or self.given):
            return found[0]
        path, number = place
        if path in self.given:
            self._places.append(Place(at=self.given.index(path)))
        else:
            self._places.append(Place(own=self.reader.read(path)) if path else Place(number=number))
        return MARK

    def part(self, part: Fields, role: str) -> tuple[str, set[str]]:
        """Return the MARK for a part of a message that is an image, and the keys of it that were read. Raises BadRow for an image
        in another turn than a question's, and for one that cannot be read."""
        if role not in ASKING:
            problem = f"an image in a {role!r} turn: a model reads images, and writes none"
            raise BadRow(problem, "put it into a user's turn, or drop the row")
        sizes = [key for key in SIZES if not says_nothing(part.get(key))]
        if sizes:
            problem = f"a part of type {part['type']!r} sets {sizes[0]}, and all images are scaled alike"
            raise BadRow(problem, "remove it: max_pixels and min_pixels of the recipe's data section scale images")
        keys = [key for key in GIVEN if not says_nothing(part.get(key))]
        if len(keys) > 1:
            raise BadRow(f"a part of type {part['type']!r} has both {keys[0]!r} and {keys[1]!r}", "keep one of them")
        if keys:
            self._places.append(Place(own=self.reader.read(part[keys[0]])))
            return MARK, set(GIVEN)
        name = next(image_columns.likely({key: part[key] for key in part if key != "type"}), "")
        if name:
            problem = f"a part of type {part['type']!r} seems to hold its image under {name!r}, which is not read"
            raise BadRow(problem, 'write {"type": "image", "image": PATH}')
        at = self._index(next((part[key] for key in INDICES if part.get(key) is not None), None))
        self._places.append(Place(at=at, part=part))
        return MARK, {*GIVEN, *INDICES}

    def _index(self, value: object) -> int | None:
        """Return which of the column's images a part names; None where it names none."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in range(len(self.given)):
            problem = f"a part of type 'image' has the index {value!r}, and {self._count()}"
            raise BadRow(problem, "an index counts the column's images from 0: fix it, or leave it out of all parts")
        return int(value)

    def _count(self) -> str:
        return f"images in column {self.column!r}: {len(self.given):,}" if self.column else "no column has images"

    def finish(self, messages: list[Message]) -> list[Message]:
        """Return the messages of the row, with the column's images before the first user's text where nothing says where they
        stand. Raises BadRow where places and images do not fit."""
        if self.given and not self._places and not self._elsewhere:
            messages = self._in_front(messages)
            self._places = [Place()] * len(self.given)
        elif self._places and not self.given and any(place.own is None for place in self._places):
            image_columns.refuse_overlooked(self.row, messages)
        taken = iter(self._order())
        self.whole = [place.own or self.reader.read(self.given[next(taken)]) for place in self._places]
        if sum(turn["content"].count(MARK) for turn in messages) != len(self.whole):
            raise BadRow(f"a text has the character U+{ord(MARK):04X}, which stands for images here", "remove it")
        if self.whole and any(_BOX.search(turn["content"]) for turn in messages):
            self.row.said.add(BOXES)
        self._messages = messages
        return messages

    def _in_front(self, messages: list[Message]) -> list[Message]:
        """Return messages with a MARK for each of the column's images before the first user's text."""
        first = next((number for number, turn in enumerate(messages) if turn["role"] == "user"), None)
        if first is None:
            raise BadRow(f"column {self.column!r} has images, and there is no user's turn for them", DROP)
        places = [image.get("path") if isinstance(image, dict) else image for image in self.given]
        paths = [path for path in places if isinstance(path, str) and path]
        for turn in messages:
            found = unknown_place(turn["content"], paths) if turn["role"] in ASKING else ""
            if found:
                problem = f"{found} in a {turn['role']!r} turn may be the place of an image, and is not known as one"
                raise BadRow(
                    problem, "write <image> where an image stands; to have it read as letters, put <image> first"
                )
        turn = messages[first] | {"content": MARK * len(self.given) + messages[first]["content"]}
        return [*messages[:first], turn, *messages[first + 1 :]]

    def _order(self) -> list[int]:
        """Return which of the column's images each place without an image of its own takes. Raises BadRow where they do not fit:
        all are numbered from 1 or from 0, each once; or all have an index, and each image is at a place; or they are as many."""
        places = [place for place in self._places if place.own is None]
        numbers = [place.number for place in places if place.number is not None]
        indices = [place.at for place in places if place.at is not None]
        every = list(range(len(self.given)))
        if numbers:
            order = [number - (0 not in numbers) for number in numbers]
            if len(order) == len(places) and sorted(order) == every:
                return order
            problem = f"places for images have the numbers {', '.join(map(str, numbers))}"
            others = "" if len(numbers) == len(places) else f", and {len(places) - len(numbers)} others have none"
            cure = "number each image once, from 1 on; or write <image> for each, in the column's order"
            raise BadRow(f"{problem}{others}; {self._count()}", cure)
        if indices:
            if len(indices) == len(places) and sorted(set(indices)) == every:
                return indices
            problem = f"places for images have the indices {', '.join(map(str, indices))}"
            others = "" if len(indices) == len(places) else f", and {len(places) - len(indices)} others have none"
            cure = "give each part the index of its image, counted from 0, and each image a part; or give none"
            raise BadRow(f"{problem}{others}; {self._count()}", cure)
        if len(places) != len(every):
            problem = f"places for images in users' turns (<image>, or a part without an image): {len(places):,}"
            elsewhere = "; {} in a {!r} turn is none".format(*self._elsewhere) if self._elsewhere else ""
            cure = "give as many places as images, or no places: then all come first"
            raise BadRow(f"{problem}; {self._count()}{elsewhere}", cure)
        for key in sorted({key for place in places for key in place.part}):
            numbers = [number for number in (number_in(place.part.get(key)) for place in places) if number is not None]
            if numbers != sorted(numbers) and {*numbers} in ({*every}, {each + 1 for each in every}):
                problem = f"places for images have the {key!r} {', '.join(map(str, numbers))}, which may name them"
                raise BadRow(problem, "give each part the index of its image, counted from 0; or remove that key")
        return every

    def refuse_any(self, kind: str) -> None:
        """Raise BadRow where the row has images and is no chat. kind: what it is, in words"""
        if self.given or self._places:
            raise BadRow(f"it has images, and {kind} has no place for them", WRITE)

    def refuse_overlooked(self) -> None:
        """Raise BadRow where no image was found in the row, which has been read, and something else in it seems to be one."""
        if not self.whole:
            image_columns.refuse_overlooked(self.row, self._messages)


def in_parts(content: str) -> list[dict[str, str]]:
    """Return a content with MARKs as the parts that chat templates read; a text of its own is one part."""
    return list(_parts(content)) or [{"type": "text", "text": ""}]


def _parts(content: str) -> Iterable[dict[str, str]]:
    for number, text in enumerate(content.split(MARK)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}
