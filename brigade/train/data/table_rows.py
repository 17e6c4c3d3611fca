"""Rows of tables: CSV and Parquet files, and splits of the datasets library."""

import csv
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, first_line
from ..host.cache import digest
from ..host.limits import DECODED_BYTES, ROW_BYTES, memory_limit
from . import rows as row_chunks
from .rows import Chunk, Files, Row, RowChunk, bounded

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset
    from pyarrow import parquet

AS_FILES = "give its files as train_file, which names the line of what is broken"


def refuse_twice(names: Iterable[str], place: str) -> None:
    """Raise UserError at `place` for two columns of one name: only one of them would be read."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(place, f"two columns are called {twice[0]!r}", "rename one of them, or leave it out")


def _arrow_chunk(batch: "pyarrow.RecordBatch", called: str, first: int, after: object) -> RowChunk:
    """Return a record batch as bytes of its own: pickling a slice would take along the whole table."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return RowChunk(sink.getvalue().to_pybytes(), called, first, len(batch), after)


class Csv(Files):
    """CSV with a header line; every value is a text."""

    def read(self, path: Path) -> Iterator[Row]:
        csv.field_size_limit(ROW_BYTES)  # a text may be longer than the 131,072 characters that are the default
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            try:
                names = reader.fieldnames or ()
                other = next((mark for mark in ";\t" if mark in names[0]), "") if len(names) == 1 else ""
                if other:
                    problem = f"one column, {names[0]!r}: its cells are separated by {other!r}"
                    raise UserError(f"{path}, line 1", problem, "write it with commas")
                refuse_twice([name for name in names if name], f"{path}, line 1")
                for row in reader:
                    if None in row or None in row.values():
                        cells = len([v for v in row.values() if v is not None])
                        raise ValueError(f"{cells} cells or more under a header of {len(names)}")
                    yield row
            except UnicodeDecodeError as error:
                problem = (
                    f"not UTF-8: {error.object[error.start : error.start + 1]!r}, as in Latin-1 or Windows' code pages"
                )
                cure = "write the file in UTF-8: iconv -f WINDOWS-1252 -t UTF-8"
                raise UserError(f"{path}, line {_line_that_is_not_utf_8(path)}", problem, cure) from None
            except (csv.Error, ValueError) as error:
                line = reader.line_num + isinstance(error, csv.Error)  # the reader counts a line when it has read it
                problem, cure = f"not CSV: {error}", "fix that line, or quote its cells"
                raise UserError(f"{path}, line {line}", problem, cure) from None


def _line_that_is_not_utf_8(path: Path) -> int:
    """Return the number of the first such line, from 1: a file is decoded in blocks, ahead of the line that is read."""
    number = 0
    with path.open("rb") as file, suppress(UnicodeDecodeError):
        for line in file:
            number += 1
            line.decode()
    return number


class Parquet(Files):
    """Parquet files, read a thousand rows at a time."""

    @functools.cached_property
    def size(self) -> int:  # not at the beginning: importing pyarrow takes a second
        return sum(self._open(path).metadata.num_rows for path in self.paths)

    @staticmethod
    def _open(path: Path) -> "parquet.ParquetFile":
        import pyarrow.parquet

        with _whole_parquet(path):
            return pyarrow.parquet.ParquetFile(path)

    def chunks(self, cursor: Sequence[int] | None = None) -> Iterator[Chunk]:
        first, skipped = cursor or (0, 0)
        for number in range(first, len(self.paths)):
            path = self.paths[number]
            for batch, done in self._batches(path, skipped, row_chunks.CHUNK_ROWS):
                yield _arrow_chunk(batch, str(path), done - len(batch) + 1, (number, done))
            skipped = 0

    def _batches(self, path: Path, done: int, rows: int) -> "Iterator[tuple[pyarrow.RecordBatch, int]]":
        """Yield the record batches after the first `done` rows, each with the number of rows up to its end. Where so many rows at
        a time expand to more than any honest ones, the rest is read row by row."""
        file, before = self._open(path), 0
        refuse_twice(file.schema_arrow.names, str(path))
        groups = list(range(file.num_row_groups))
        while groups and before + (size := file.metadata.row_group(groups[0]).num_rows) <= done:
            before += size  # row groups that were read to their end are not read again
            groups.pop(0)
        try:
            with _whole_parquet(path):
                batches = file.iter_batches(batch_size=rows, row_groups=groups)
                while (batch := _decoded(batches, path, before if rows == 1 else None)) is not None:
                    begin, before = max(done - before, 0), before + len(batch)
                    if begin < len(batch):
                        done = before
                        yield batch.slice(begin), done
        except MemoryError:
            yield from self._batches(path, done, 1)


def _decoded(batches: "Iterator[pyarrow.RecordBatch]", path: Path, row: int | None) -> "pyarrow.RecordBatch | None":
    """Return the next batch, or None at the end. Raises MemoryError where it expands to more than DECODED_BYTES; UserError
    instead where it is a single row, which `row` others precede."""
    more = DECODED_BYTES + path.stat().st_size  # columns are read as they lie in the file, and then decoded
    with memory_limit(more) if row is None else bounded(lambda: f"{path}, row {row + 1}", more):
        return next(batches, None)


@contextmanager
def _whole_parquet(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowMemoryError, pyarrow.ArrowCapacityError) as error:
        raise MemoryError from error
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not a whole Parquet file: {first_line(error)}"
        raise UserError(str(path), problem, "write or download it again") from None


def digests_of(folder: Path) -> list[str]:
    """Return the digests of all files in a directory, in the order of their paths."""
    return [digest(path) for path in sorted(folder.rglob("*")) if path.is_file()]


def why_unread(error: Exception) -> str:
    """Return why the datasets library cannot read files: its own error may only say that one occurred."""
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    hidden = (error.__cause__ or error.__context__) if isinstance(error, DatasetGenerationError) else None
    reason = hidden or error
    return f"its files differ: {reason.details()}" if isinstance(reason, CastError) else first_line(reason)


class Table:
    """A split of the datasets library, in memory-mapped files or streamed.

    version: configuration, split and commit of the data set at `place`
    """

    def __init__(self, split: "Dataset | IterableDataset", place: str, version: tuple[str | None, ...] = ()) -> None:
        import datasets

        self.place, self.split, self.version = place, split, version
        self.size = None if isinstance(split, datasets.IterableDataset) else len(split)

    def digests(self) -> list[str]:
        """Return the digests of a local directory, whose content may change, or the name of a set on the Hub; then the
        version."""
        folder = Path(self.place)
        return [*(digests_of(folder) if folder.is_dir() else [self.place]), repr(self.version)]

    def chunks(self, cursor: tuple[int, dict[str, object] | None] | None = None) -> Iterator[RowChunk]:
        done, state = cursor or (0, None)
        if done and done == self.size:  # datasets selects no empty range at its end
            return
        rows = self.split.select(range(done, self.size)) if done and self.size else self.split
        rows = rows.with_format("arrow")  # a copy, with a position of its own
        if state:
            rows.load_state_dict(state)
        tables = rows.iter(batch_size=row_chunks.CHUNK_ROWS)
        while (table := self._next(tables, done)) is not None:
            begin, done = done, done + len(table)
            state = rows.state_dict() if self.size is None else None
            yield _arrow_chunk(table.combine_chunks().to_batches()[0], self.place, begin + 1, (done, state))

    def _next(self, tables: "Iterator[pyarrow.Table]", done: int) -> "pyarrow.Table | None":
        """Return the next table, after `done` rows, or None at the end. Raises UserError for one that cannot be read, or expands
        too far (bounded())."""
        place = f"{self.place}, row {done + 1}"
        try:
            with bounded(lambda: place):
                return next(tables, None)
        except ValueError as error:  # only of a stream: other files were read when the split was made
            raise UserError(place, f"from here on it cannot be read: {why_unread(error)}", AS_FILES) from None
