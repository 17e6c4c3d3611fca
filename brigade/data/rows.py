"""Rows of files and data sets, read in chunks, in order.

A chunk travels to the process that tokenises it, names each row's place for messages, and knows where the next one
begins: `after` is a cursor that `chunks` takes to continue there.
"""

import codecs
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError
from .cache import digest

CHUNK_BYTES, CHUNK_ROWS = 1 << 20, 1000
NEWLINE = b"\n"

Row = dict[str, Any]


class BadRow(Exception):
    """(problem, cure) of a row; who reads the chunk knows its place."""


class Chunk(Protocol):
    @property
    def after(self) -> Any: ...

    @property
    def size(self) -> int:
        """In the unit of Rows.size."""
        ...

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """Each row with its number in the chunk; in place of one that cannot be read, what is wrong with it."""
        ...

    def place(self, number: int) -> str:
        """Where a row stands: file and line, or data set and row."""
        ...


class Rows(Protocol):
    """The rows of one split. size: bytes or rows, for the progress bar (None: unknown)."""

    @property
    def place(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    def chunks(self, cursor: Any = None) -> Iterator[Chunk]: ...

    def digests(self) -> list[str]:
        """What identifies the content."""
        ...


class Files:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.place = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent}/*{paths[0].suffix}"

    def digests(self) -> list[str]:
        return [digest(path) for path in self.paths]


class JsonLines(Files):
    """One JSON object a line. Chunks are byte ranges that begin and end with a line."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.size = sum(path.stat().st_size for path in paths)

    def chunks(self, cursor: Any = None) -> Iterator["_Lines"]:
        first, begin = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            total = path.stat().st_size
            with path.open("rb") as file:
                while begin < total:
                    file.seek(min(begin + CHUNK_BYTES, total))
                    file.readline()
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

    def place(self, number: int) -> str:
        before, left = 0, self.begin  # lines are only counted when one is to be named
        with self.path.open("rb") as file:
            while left:
                block = file.read(min(left, CHUNK_BYTES))
                before, left = before + block.count(NEWLINE), left - len(block)
        return f"{self.path}, line {before + number + 1}"

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        lines = (content if self.begin else content.removeprefix(codecs.BOM_UTF8)).split(NEWLINE)
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8").rstrip())
            except UnicodeDecodeError:
                yield number, BadRow(f"not UTF-8: {line[:40]!r}", "give text: JSONL in UTF-8")
            except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits
                known = isinstance(error, json.JSONDecodeError)
                said = f"{error.msg} at column {error.colno}" if known else str(error)[:80]  # type: ignore[union-attr]
                yield number, BadRow(f"not JSON: {said}: {line.decode()[:40]!r}", "mend or delete that line")


class Csv(Files):
    """CSV with a header line; every value is a text."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.size = None

    def chunks(self, cursor: Any = None) -> Iterator["_Rows"]:
        csv.field_size_limit(1 << 30)  # a text may be longer than the 131,072 characters that are the default
        first, skipped = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                done, rows = 0, []
                try:
                    names = reader.fieldnames or ()
                    if len(names) == 1 and (other := next((mark for mark in ";\t" if mark in names[0]), "")):
                        raise UserError(
                            f"{path}, line 1",
                            f"one column, {names[0]!r}: its cells are separated by {other!r}",
                            "write it with commas",
                        )
                    for row in reader:
                        done += 1
                        if done <= skipped:
                            continue
                        if None in row or None in row.values():
                            cells = len([v for v in row.values() if v is not None])
                            raise ValueError(f"{cells} cells or more under a header of {len(names)}")
                        rows.append(row)
                        if len(rows) == CHUNK_ROWS:
                            yield _Rows(rows, f"{path}, row", done - len(rows) + 1, (number, done))
                            rows = []
                except (csv.Error, ValueError) as error:  # the reader counts a line when it has read it
                    line = reader.line_num + isinstance(error, csv.Error)
                    raise UserError(
                        f"{path}, line {line}", f"not CSV in UTF-8: {error}", "mend that line, or quote its cells"
                    ) from None
                if rows:
                    yield _Rows(rows, f"{path}, row", done - len(rows) + 1, (number, done))
            skipped = 0


@dataclass(frozen=True)
class _Rows:
    """Rows as they are."""

    content: list[Row]
    called: str
    first: int
    after: Any

    @property
    def size(self) -> int:
        return len(self.content)

    def place(self, number: int) -> str:
        return f"{self.called} {self.first + number}"

    def rows(self) -> Iterator[tuple[int, Row]]:
        return enumerate(self.content)


class Parquet(Files):
    """Parquet files, read a thousand rows at a time."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.size = sum(self._open(path).metadata.num_rows for path in paths)

    @staticmethod
    def _open(path: Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise _broken(path, error) from None

    def chunks(self, cursor: Any = None) -> Iterator["_Arrow"]:
        import pyarrow

        first, skipped = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path, done = self.paths[number], 0
            file = self._open(path)
            groups: list[int] = []  # those that are not read to their end yet
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if not groups and done + rows <= skipped:
                    done += rows
                else:
                    groups.append(group)
            try:
                for batch in file.iter_batches(batch_size=CHUNK_ROWS, row_groups=groups):
                    begin, done = max(skipped - done, 0), done + len(batch)
                    if begin < len(batch):
                        batch = batch.slice(begin)
                        yield _Arrow(_ipc(batch), f"{path}, row", done - len(batch) + 1, len(batch), (number, done))
            except (pyarrow.ArrowException, OSError) as error:
                raise _broken(path, error) from None
            skipped = 0


def _broken(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
    return UserError(str(path), f"not a whole Parquet file: {reason}", "write or download it again")


def _ipc(batch: Any) -> bytes:
    """A record batch as bytes of its own: pickling a slice would take along the whole table."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@dataclass(frozen=True)
class _Arrow:
    content: bytes
    called: str
    first: int
    size: int
    after: Any

    def place(self, number: int) -> str:
        return f"{self.called} {self.first + number}"

    def rows(self) -> Iterator[tuple[int, Row]]:
        import pyarrow

        for number, row in enumerate(pyarrow.ipc.open_stream(self.content).read_all().to_pylist()):
            yield number, {name: _without_none(value) for name, value in row.items()}


def _without_none(value: Any) -> Any:
    """Arrow gives every struct the keys of all others, as None."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


class Table:
    """A split of the datasets library, in memory-mapped files or streamed. version: which configuration, split and commit
    of what is at `place`."""

    def __init__(self, split: Any, place: str, version: tuple[str | None, ...] = ()) -> None:
        import datasets

        self.place, self.split, self.version = place, split, version
        self.size = None if isinstance(split, datasets.IterableDataset) else len(split)

    def digests(self) -> list[str]:
        """A local directory's content, which may change under its name; the name of a set on the Hub; the version."""
        folder = Path(self.place)
        local = folder.is_dir()
        files = [digest(path) for path in sorted(folder.rglob("*")) if path.is_file()] if local else [self.place]
        return [*files, repr(self.version)]

    def chunks(self, cursor: Any = None) -> Iterator[_Arrow]:
        done, state = cursor or (0, None)
        if done and done == self.size:  # datasets selects no empty range at its end
            return
        rows = self.split.select(range(done, self.size)) if done and self.size else self.split
        rows = rows.with_format("arrow")  # a copy, with a position of its own
        if state:
            rows.load_state_dict(state)
        for table in rows.iter(batch_size=CHUNK_ROWS):
            begin, done = done, done + len(table)
            state = rows.state_dict() if self.size is None else None
            batch = table.combine_chunks().to_batches()[0]
            yield _Arrow(_ipc(batch), f"{self.place}, row", begin + 1, len(table), (done, state))
