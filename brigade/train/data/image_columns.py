"""Which columns of a row hold its images, and which others seem to. Imports no torch."""

from collections.abc import Iterator

from ...errors import shown
from ...errors.tables import Document
from .arrow_values import json_or
from .image_places import is_named_as_image
from .images import BASE64
from .keys import IMAGES, Row, says_nothing
from .rows import BadRow, Message

HOLDING = ("bytes", "path", "url")  # keys of an image that is an object, as the datasets library stores it
# What other sets call a column of images, but for what stands before or behind: image_path, img_url, image_1, jpg.
STEMS = ("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "jpg", "jpeg", "png", "webp")
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")  # of files of images
BESIDE = ("path", "paths", "file", "files", "filename", "name", "url", "urls", "bytes", "base64", "data", "src", "list")


def given(row: Row) -> tuple[str, list[object]]:
    """Return the source's name of the column with the row's images, and what it holds; "" and [] where there is none. Raises
    BadRow for a column that holds no images."""
    there = [key for key in IMAGES if not says_nothing(row.get(key))]
    if len(there) > 1:
        names = " and ".join(repr(row.name(key)) for key in there)
        raise BadRow(f"both columns {names} hold images", "name the one that is meant, and ignore the other in columns")
    if not there:
        return "", []
    value = row.get(there[0])
    if isinstance(value, str) and value.lstrip().startswith("["):  # a list, as CSV holds it
        value = json_or(value, value)
    values = value if isinstance(value, list) else [value]
    bad = next((each for each in values if not _may_be_image(each)), values)
    if bad is not values:
        name = row.name(there[0])
        raise BadRow(
            f"column {name!r} holds {shown(bad)}, which is no image", "give paths, or lists of them; or ignore it"
        )
    return row.name(there[0]), values


def refuse_overlooked(row: Row, messages: list[Message]) -> None:
    """Raise BadRow for a row in which no image was found, although another column, or a key of a turn, seems to hold one."""
    columns = list(likely({name: row.content[name] for name in row.unread()}))
    if columns:
        name = columns[0]
        others = f" (as do {', '.join(map(repr, columns[1:]))}: put all of a row into one list)" if columns[1:] else ""
        problem = (
            f"no image was found in the row, and column {name!r} seems to hold one{others}: {shown(row.content[name])}"
        )
        value = row.content[name]
        values = value if isinstance(value, list) else [value]
        write = (
            f"columns: {{images: {name}}}" if all(map(_may_be_image, values)) else "write its images as a column images"
        )
        raise BadRow(problem, f"{write}; to leave it out on purpose: columns: {{ignore: {name}}}")
    for turn in messages:
        name = next(likely({key: value for key, value in turn.items() if key not in ("role", "content")}), "")
        if name:
            problem = (
                f"no image was found in the row, and the key {name!r} of a {turn['role']!r} turn seems to hold one"
            )
            raise BadRow(problem, "write it as a part of the content, or in a column images (docs/images.md)")


def likely(content: Document) -> Iterator[str]:
    """Yield the names whose values are images by their look, or may be some and are named so."""
    for name, value in content.items():
        values = value if isinstance(value, list) else [value]
        if any(map(_looks_like_image, values[:1])) or (_named_so(str(name)) and any(map(_may_be_image, values[:1]))):
            yield name


def _named_so(name: str) -> bool:
    """Whether a name is one of STEMS, with words of BESIDE or a number behind it, or other words before it."""
    words = name.lower().replace("-", "_").replace(".", "_").split("_")
    while len(words) > 1 and (words[-1] in BESIDE or words[-1].isdigit()):
        words.pop()
    return words[-1].rstrip("0123456789") in STEMS


def _looks_like_image(value: object) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) or any(likely(value))
    if isinstance(value, bytes):
        return value.startswith(BEGINNINGS)
    if not isinstance(value, str):
        return False
    return BASE64.fullmatch(value) is not None or (" " not in value and is_named_as_image(value))


def _may_be_image(value: object) -> bool:
    if isinstance(value, dict):
        return any(not says_nothing(value.get(key)) for key in HOLDING)
    return isinstance(value, (str, bytes)) and bool(value)
