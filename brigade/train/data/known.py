"""What a second model says of samples, in a file beside the prepared data: rows of numbers, for each sample or supervised token.

A row is zeros until it is computed, so that a run which was interrupted goes on with the others. Each has a checksum: a row that
is not what was written is computed again before training, and refused when it is read.
"""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...errors import UserError
from ...errors.disk import writing
from ..host import files

TOGETHER = 2**24  # bytes of rows that are checked at once


class Known:
    """Numbers of samples.

    key: of a sample, under which they stand; begins: the row at which each sample's begin, and the end; int64 (samples + 1,)
    columns: fp64 numbers of a row
    """

    def __init__(self, file: Path, key: str, begins: np.ndarray, columns: int) -> None:
        self.file, self.key, self.begins, self.columns = file, key, begins, columns
        self.dtype = np.dtype([("values", np.float64, (columns,)), ("check", np.uint64)])

    def create(self) -> None:
        """Make the file, with nothing known in it yet, where it is missing or belongs to others."""
        rows = (int(self.begins[-1]),)
        if self.file.exists():
            with suppress(OSError, ValueError):
                there = np.load(self.file, mmap_mode="r")
                if (there.shape, there.dtype) == (rows, self.dtype):
                    return
            print(f"{self.file} is not what was written: it is computed anew.", file=sys.stderr)
        with writing(self.file.parent), files.replacing(self.file, secret=True) as new:
            header = np.lib.format.header_data_from_array_1_0(np.zeros(0, self.dtype)) | {"shape": rows}
            np.lib.format.write_array_header_1_0(new, header)
            new.flush()  # and the disk's room is taken now: a full one would end the process that writes to mapped memory
            os.posix_fallocate(new.fileno(), 0, new.tell() + rows[0] * self.dtype.itemsize)

    def unknown(self) -> tuple[np.ndarray, int]:
        """Return for which samples something is unknown, bool (samples,), and how many rows are not what was written."""
        unknown, damaged = [np.zeros(1, np.int64)], 0
        for part, kept in self._parts():
            never = (kept["check"] == 0) & ~kept["values"].view(np.uint64).any(axis=1)
            odd = kept["check"] != self._checks(np.arange(part.start, part.stop), kept["values"])
            damaged += int((odd & ~never).sum())
            unknown.append(odd)
        before = np.cumsum(np.concatenate(unknown))
        return before[self.begins[1:]] > before[self.begins[:-1]], damaged

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of samples, in their order; int64 (rows,)."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(*self.begins[[each, each + 1]]) for each in samples)])

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Keep what is known of these rows. values: fp64 (rows, columns)"""
        kept = np.zeros(len(rows), self.dtype)
        kept["values"], kept["check"] = values, self._checks(rows, values)
        self._to_write[rows] = kept

    def flush(self) -> None:
        self._to_write.flush()

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Return what is known of samples: fp64 (rows, columns). Raises UserError where it is not what was written."""
        rows = self.rows_of(samples)
        kept = self._to_read[rows]
        if (kept["check"] != self._checks(rows, kept["values"])).any():
            raise UserError(str(self.file), "it is not what was written", "start the run again, which computes it anew")
        return np.ascontiguousarray(kept["values"])

    def _parts(self) -> Iterator[tuple[slice, np.ndarray]]:
        rows = max(1, TOGETHER // self.dtype.itemsize)
        for begin in range(0, len(self._to_read), rows):
            kept = np.array(self._to_read[begin : begin + rows])
            yield slice(begin, begin + len(kept)), kept

    def _checks(self, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return a checksum of each row, of its number and of the file's name; none is 0."""
        data, size = values.tobytes(), 8 * self.columns
        name = xxhash.xxh3_64_intdigest(self.file.name.encode())
        own = (
            xxhash.xxh3_64_intdigest(data[number * size : (number + 1) * size], name ^ row) or 1
            for number, row in enumerate(rows.tolist())
        )
        return np.fromiter(own, np.uint64, len(rows))

    @functools.cached_property
    def _to_read(self) -> np.ndarray:
        kept: np.ndarray = np.load(self.file, mmap_mode="r")
        return kept

    @functools.cached_property
    def _to_write(self) -> Any:
        return np.load(self.file, mmap_mode="r+")

    def __getstate__(self) -> dict[str, Any]:  # a worker process maps the file anew
        return {key: value for key, value in vars(self).items() if not key.startswith("_to_")}
