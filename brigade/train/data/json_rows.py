"""Rows of JSON: one object a line, or documents that span lines, which are an array of rows or several objects."""

import codecs
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, get_args

from ...errors import UserError
from ..host.limits import DOCUMENT_BYTES, ROW_BYTES, gib
from ..recipe.value_types import Column
from . import rows
from .arrow_values import DECODER, json_or
from .keys import says_nothing
from .rows import NEWLINE, BadRow, Chunk, Files, Row, Where

# Keys under which an object holds all rows of a file, or those of a split.
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
WRAPPERS = ("data", "rows", "examples", "samples", "instances", *SPLITS)


class JsonLines(Files):
    """One JSON object a line. Chunks are byte ranges of whole lines, decoded in the process that tokenises them."""

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def chunks(self, cursor: Sequence[int] | None = None) -> Iterator[Chunk]:
        first, begin = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            total = path.stat().st_size
            with path.open("rb") as file:
                while begin < total:
                    file.seek(min(begin + rows.CHUNK_BYTES, total))
                    _pass_line(file, path)
                    end = file.tell()
                    yield _Lines(path, begin, end, (number, end))
                    begin = end
            begin = 0


@dataclass(frozen=True)
class _Lines:
    path: Path
    begin: int
    end: int
    after: Any

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def where(self) -> Where:
        return Where(str(self.path), self.begin, of_lines=True)

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        lines = (content if self.begin else content.removeprefix(codecs.BOM_UTF8)).split(NEWLINE)
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield number, DECODER.decode(line.decode("utf-8").rstrip())
            except UnicodeDecodeError:
                yield number, BadRow(f"not UTF-8: {line[:40]!r}", "give text: JSONL in UTF-8")
            except (ValueError, RecursionError) as error:
                problem = f"not JSON: {_json_problem(error)}: {line.decode()[:40]!r}"
                yield number, BadRow(problem, "fix or delete that line")


def _pass_line(file: IO[bytes], path: Path) -> None:
    """Go to the end of a line. Raises UserError with the line's number where that is longer than any row."""
    begin = file.tell()
    line = file.readline(ROW_BYTES)
    if len(line) == ROW_BYTES and not line.endswith(NEWLINE):
        number = Where(str(path), begin, of_lines=True).row(0)
        problem = f"the line is longer than {ROW_BYTES // 2**20} MiB (ROW_BYTES in brigade/train/host/limits.py)"
        raise UserError(f"{path}, line {number}", problem, "divide that row, or write one object a line")


def _json_problem(error: Exception) -> str:
    # A ValueError of another class: an integer of thousands of digits.
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)[:80]


class JsonDocuments(Files):
    """One JSON array of rows, as json.dump writes a list; an object that holds such a list ({"data": [...]}); or objects of
    several lines each. The text is read as a whole, but an array is decoded row by row: memory holds its characters only."""

    def read(self, path: Path) -> Iterator[Row]:
        return _rows(path, _text_of(path))


def _text_of(path: Path) -> str:
    size = path.stat().st_size
    if size > DOCUMENT_BYTES:
        problem = f"{gib(size)} of JSON in one document, of which {gib(DOCUMENT_BYTES)} are read"
        raise UserError(str(path), problem, "write one object a line (.jsonl), which is read in parts")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"not UTF-8 at byte {error.start:,}", "give text: JSON in UTF-8") from None


def _rows(path: Path, text: str) -> Iterator[Row]:
    """Yield the rows of a document, each decoded when it is asked for. Raises UserError, with the line, for what is broken."""
    at = _after_blanks(text, 0)
    try:
        if text.startswith("[", at):
            yield from _elements(text, at)
            return
        while at < len(text):
            begin = at
            document, at = _decode(text, at)
            at = _after_blanks(text, at)
            inside = _wrapped(document, path)
            if inside is not None and (begin > _after_blanks(text, 0) or at < len(text)):
                raise json.JSONDecodeError("an object of rows beside others", text, begin)
            yield from [document] if inside is None else inside
    except json.JSONDecodeError as error:
        at = error.pos
        place = f"{path}, line {text.count(chr(10), 0, at) + 1}"
        problem = f"not JSON rows: {_json_problem(error)}: {text[at : at + 40]!r}"
        raise UserError(place, problem, "fix it there, or write one object a line (.jsonl)") from None


def _elements(text: str, at: int) -> Iterator[Row]:
    at = _after_blanks(text, at + 1)
    closed = text.startswith("]", at)
    while not closed:
        row, at = _decode(text, at)
        yield row
        at = _after_blanks(text, at)
        closed = text.startswith("]", at)
        if not closed and not text.startswith(",", at):
            raise json.JSONDecodeError("',' or ']' wanted after a row", text, at)
        at = at if closed else _after_blanks(text, at + 1)
    end = _after_blanks(text, at + 1)
    if end < len(text):
        raise json.JSONDecodeError("more behind the array's end", text, end)


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Return the value at a place, and where it ends. Raises JSONDecodeError for whatever is wrong with it."""
    try:
        return DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; too deep
        raise json.JSONDecodeError(str(error)[:60], text, at) from None


def _after_blanks(text: str, at: int) -> int:
    return next((i for i in range(at, len(text)) if text[i] not in " \t\r\n"), len(text))


def _wrapped(document: object, path: Path) -> list[Row] | None:
    """Return the rows of an object that holds all of them under one key, or None for an object that is a row itself. Raises
    UserError for one that holds those of several splits, and for one that says beside the rows what is read of a row only."""
    if not isinstance(document, dict):
        return None
    lists = {key: value for key, value in document.items() if key in WRAPPERS and isinstance(value, list)}
    if any(isinstance(row, dict) and row.keys() & {"role", "from"} for rows in lists.values() for row in rows):
        return None
    if len(lists) > 1 and not lists.keys().isdisjoint(SPLITS):
        names = " and ".join(map(repr, lists))
        raise UserError(str(path), f"one object with several lists of rows: {names}", "give each a file of its own")
    if len(lists) != 1:
        return None
    ((key, inside),) = lists.items()
    beside = next((name for name in get_args(Column) if not says_nothing(document.get(name))), None)
    if beside:
        problem = f"{beside!r} beside the rows under {key!r}, and it is read of a row only"
        raise UserError(str(path), problem, f"give each row its own {beside!r}, or remove it")
    return inside


def is_document(path: Path) -> bool:
    """Whether a file of JSON holds documents rather than one object a line. Its first lines tell."""
    lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in _first_lines(path))
    first, *others = [*itertools.islice((line for line in lines if line), 3)] or [b""]
    if first.startswith(b"["):
        return True
    if not first.startswith(b"{"):
        return False
    document = json_or(None, first)
    if document is not None:
        return not others and _wrapped(document, path) is not None
    return bool(others) and any(not isinstance(json_or(None, line), dict) for line in others)


def _first_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(ROW_BYTES):  # of a document in one line, the beginning is enough
            yield line
