"""Rows of files and data sets, read in chunks, in order.

A chunk travels to the process that tokenises it, can name the place of each of its rows, and knows where the next chunk
begins: `after` is a cursor from which `chunks` goes on.
"""

import datetime
import decimal
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...errors import UserError, first_line, shortened, shown
from ..host.cache import digest
from ..host.limits import DECODED_BYTES, gib, memory_limit
from .arrow_values import reader_of

if TYPE_CHECKING:
    import pyarrow

CHUNK_BYTES, CHUNK_ROWS = 1 << 20, 1000
NEWLINE = b"\n"

Row = dict[str, Any]
Message = dict[str, Any]  # a turn of a chat
Tools = list[Any]  # definitions of functions that a chat may call
Variables = dict[str, Any]  # what a chat template gets beside messages and tools


class Chat(NamedTuple):
    """What a chat template makes a text of."""

    messages: list[Message]
    tools: Tools | None = None
    variables: Variables = {}

    def asking(self, prompt: bool = True) -> "Chat":
        """Return the chat as one whose next turn the assistant writes. prompt: or as a whole one"""
        return self._replace(variables=self.variables | {"add_generation_prompt": prompt})


class BadRow(Exception):
    """(problem, cure) of a row that cannot be used; the reader of its chunk knows the place."""


# What tables hold that no text is.
OF_TABLES = ((datetime.date, "a date"), (datetime.time, "a time"), (datetime.timedelta, "a time"), (bytes, "bytes"),
             (decimal.Decimal, "a decimal number"))  # fmt: skip


def not_text(called: str, value: object, cure: str) -> BadRow:
    """Return the error of a value that is not a text, nor a list of messages where one may stand. called: where it is"""
    kind = next((name for types, name in OF_TABLES if isinstance(value, types)), None)
    if kind is None:
        return BadRow(f"{called} is {'missing' if value is None else shown(value)}, not text", cure)
    cure = (
        "write it as text (cast the column to string); the datasets library makes dates of texts: train_file does not"
    )
    return BadRow(f"{called} is {kind} ({shortened(str(value))}), not text", cure)


class Chunk(Protocol):
    """Rows that are tokenised together. after: the cursor after them; size: in the unit of Rows.size"""

    @property
    def after(self) -> object: ...

    @property
    def size(self) -> int: ...

    @property
    def where(self) -> "Where": ...

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """Yield each row with its number in the chunk; instead of one that cannot be read, what is wrong with it."""
        ...


class Where(NamedTuple):
    """Where a chunk begins: at a byte of a file of lines, or at a row (counted from 1) of another file or a data set."""

    source: str
    first: int
    of_lines: bool

    def row(self, number: int) -> int:
        """Return the line, or the number from 1, of the row that has this number in the chunk."""
        if not self.of_lines:
            return self.first + number
        before, left = 0, self.first  # lines are counted only when one is to be named
        with Path(self.source).open("rb") as file:
            while left:
                block = file.read(min(left, CHUNK_BYTES))
                before, left = before + block.count(NEWLINE), left - len(block)
        return before + number + 1

    def place(self, number: int) -> str:
        """Return where a row stands, in words: file and line, or data set and row."""
        return f"{self.source}, {'line' if self.of_lines else 'row'} {self.row(number)}"


class Rows(Protocol):
    """The rows of one split. size: bytes or rows, for the progress bar (None: unknown)."""

    @property
    def place(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    def chunks(self, cursor: Any = None) -> Iterator[Chunk]: ...

    def digests(self) -> list[str]:
        """Return what identifies the content."""
        ...


@dataclass(frozen=True)
class RowChunk:
    """Rows, as they are or as an Arrow stream. first: the number of its first row in the file or data set `called`"""

    content: list[Row] | bytes
    called: str
    first: int
    size: int
    after: Any

    @property
    def where(self) -> Where:
        return Where(self.called, self.first, of_lines=False)

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        if isinstance(self.content, list):
            yield from enumerate(self.content)
            return
        import pyarrow

        with bounded(lambda: self.where.place(0)):
            table = pyarrow.ipc.open_stream(self.content).read_all()
            rows = _rows_of(table)
        read = reader_of(table.schema)
        for number, row in enumerate(rows):
            try:
                yield number, row if isinstance(row, BadRow) else read(row)
            except ValueError as error:
                yield number, BadRow(str(error), "write that row again, as JSON")


def _rows_of(table: "pyarrow.Table") -> list[Row | BadRow]:
    """Return the rows of an Arrow table; what is wrong with it instead of one that Python cannot hold: a text that is not UTF-8,
    a map with a key twice, a date beyond the year 9999."""
    try:
        rows: list[Row | BadRow] = table.to_pylist(maps_as_pydicts="strict")
        return rows
    except (ValueError, KeyError, OverflowError) as error:
        if len(table) > 1:
            return [row for number in range(len(table)) for row in _rows_of(table.slice(number, 1))]
        return [BadRow(f"a column cannot be read: {first_line(error)}", "write that row again, or drop it")]


class Files:
    """Files of one kind, read in order. A cursor: (number of the file, rows of it that are done)."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.place = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent}/*{paths[0].suffix}"

    @property
    def size(self) -> int | None:
        """Return the rows or bytes of all files; None where only their end tells."""
        return None

    def digests(self) -> list[str]:
        return [digest(path) for path in self.paths]

    def read(self, path: Path) -> Iterator[Row]:
        """Yield all rows of a file. Raises UserError where it is broken."""
        raise NotImplementedError

    def chunks(self, cursor: Sequence[int] | None = None) -> Iterator[Chunk]:
        first, done = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            rows = itertools.islice(self.read(path), done, None)
            while part := list(itertools.islice(rows, CHUNK_ROWS)):
                yield RowChunk(part, str(path), done + 1, len(part), (number, done + len(part)))
                done += len(part)
            done = 0


@contextmanager
def bounded(place: Callable[[], str], more: int = DECODED_BYTES) -> Iterator[None]:
    """Raise UserError at `place()` for rows that expand to more than any honest ones."""
    try:
        with memory_limit(more):
            yield
    except MemoryError:
        problem = f"from here on it expands to more than {gib(DECODED_BYTES)} of memory (DECODED_BYTES in train/host/limits.py)"
        raise UserError(place(), problem, "look at that row, and write the file again without it") from None
