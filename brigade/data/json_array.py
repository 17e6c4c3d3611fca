"""JSON files that are one array of rows, as json.dump writes a list."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import rows

_WHITE = re.compile(r"[ \t\r\n]*")


def is_one(path: Path) -> bool:
    """Whether a file begins with a bracket, where one of lines has a brace."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


class JsonArrays(rows.Files):
    """A file is read as a whole, and decoded row by row: in memory lie its characters, not its objects."""

    size = None

    def chunks(self, cursor: Any = None) -> Iterator[rows._Rows]:
        first, skipped = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path, done, part = self.paths[number], 0, []
            for row in _elements(path):
                done += 1
                if done > skipped:
                    part.append(row)
                if len(part) == rows.CHUNK_ROWS:
                    yield rows._Rows(part, f"{path}, row", done - len(part) + 1, (number, done))
                    part = []
            if part:
                yield rows._Rows(part, f"{path}, row", done - len(part) + 1, (number, done))
            skipped = 0


def _elements(path: Path) -> Iterator[Any]:
    """Each element of the array. Raises UserError at the line where it is broken."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"not UTF-8 at byte {error.start:,}", "give text: JSON in UTF-8") from None
    decode, at = json.JSONDecoder().raw_decode, _after(text, text.index("[") + 1)
    closed = text.startswith("]", at)
    try:
        while not closed:
            row, at = decode(text, at)
            yield row
            at = _after(text, at)
            closed = text.startswith("]", at)
            if not closed and not text.startswith(",", at):
                raise json.JSONDecodeError("',' or ']' wanted after a row", text, at)
            at = at if closed else _after(text, at + 1)
        if (end := _after(text, at + 1)) < len(text):
            raise json.JSONDecodeError("more behind the array's end", text, end)
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits
        if isinstance(error, json.JSONDecodeError):
            at = error.pos
        said = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)[:80]
        line = text.count("\n", 0, at) + 1
        raise UserError(
            f"{path}, line {line}",
            f"not a JSON array of rows: {said}: {text[at : at + 40]!r}",
            "mend it there, or write one object a line (.jsonl)",
        ) from None


def _after(text: str, at: int) -> int:
    """The first place from `at` on that is no white space."""
    match = _WHITE.match(text, at)
    return match.end() if match else at
