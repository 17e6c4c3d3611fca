"""Mark whose word it is: what ranks other than the first print, log or warn of begins with their number."""

import io
import logging
import sys
import warnings
from typing import TextIO


class _Marked(io.TextIOBase):
    """Writes whole lines to `stream`, each after a mark, but for empty ones."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self.stream, self.mark, self.begun = stream, mark, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            if line.strip():
                self.stream.write(f"{self.mark}{line}\n")
        return len(text)

    def flush(self) -> None:
        if self.begun:
            self.write("\n")
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


def mark(rank: int) -> None:
    """Mark what this process says from now on as this rank's."""
    mark = f"rank {rank}: "
    if not isinstance(sys.stdout, _Marked):
        sys.stdout = _Marked(sys.stdout, mark)
    if not (formatted := warnings.formatwarning)("", UserWarning, "", 0).startswith(mark):  # nor by an earlier run
        warnings.formatwarning = lambda *args, **options: mark + formatted(*args, **options)
        record = logging.getLogRecordFactory()

        def marked(*args: object, **options: object) -> logging.LogRecord:
            one = record(*args, **options)
            one.msg = f"{mark}{one.msg}"
            return one

        logging.setLogRecordFactory(marked)
