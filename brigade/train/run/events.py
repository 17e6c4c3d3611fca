"""What happened to a run, a JSON line each in its directory, for whoever watches from outside.

    {"time": "2026-11-23T04:05:06+00:00", "event": "checkpoint", "step": 40, ...}

Rank 0, `launch` or a rank that fails writes: started, first step, step, checkpoint, upload, upload failed, evaluation, slow,
grace, fault, failed, restart, stopped, end.
A rank that was traced writes: profile.
"""

import errno
import json
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ...errors.disk import exists
from ...errors.tables import Fields
from ..distributed.process import this_process
from ..host import files
from . import typed

FILE = "events.jsonl"
_RECORD = "run.yaml"  # directory.RECORD, which needs this module
MOST = 2**30  # bytes of it that are read
SLOW = 0.7  # the score below which a rank is slow (watch/slow_ranks.py)


def add(directory: Path, event: str, **fields: object) -> None:
    """Append one event. A disk that is full or away costs the line, not the run."""
    if exists(directory / _RECORD):  # else it is no run's directory, or none any more: nothing is made there
        append(directory / FILE, event=event, **fields)


def append(file: Path, **fields: object) -> None:
    """Append one line, with its time, to a file in a run's directory. A link, which others may have made, gets no line: that is
    said once."""
    if not (file.parent / _RECORD).is_file():  # it is no run's, or none any more: nothing is made there
        return
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
    try:
        with files.append(file) as lines:
            lines.write((json.dumps(line, default=str) + "\n").encode())
    except OSError as error:
        if error.errno == errno.ELOOP and file not in this_process.refused:
            this_process.refused.add(file)
            text = f"warning: nothing is added to {file}: {error.strerror}. Move it away, and a new one is begun"
            print(text, file=sys.stderr, flush=True)


def read(directory: Path, only: str = "") -> list[Fields]:
    """All whole lines, oldest first; [] where there are none. only: of these events, which is quick in a long file"""
    events = []
    with suppress(OSError):
        for line in files.read_text(directory / FILE, MOST, "replace").splitlines():
            with suppress(ValueError, RecursionError):  # one that is being written, or was cut by a crash
                if f'"{only}' in line:
                    events.append(typed.kept(typed.loaded(line), typed.EVENT))
    return list(filter(None, events))


def slowest(directory: Path, event: str) -> float:
    """The most seconds that one of these events took; 0.0 where none is known."""
    told = (line for line in read(directory, event) if line.get("event") == event)
    return max((float(line.get("seconds") or 0) for line in told), default=0.0)
