"""What a rank lets `launch` know of itself, where that started it (launched.py)."""

import json
import os
from contextlib import suppress
from typing import Any

RUN = "BRIGADE_RUN"  # in the environment of every process of a launch: its name, by which all of them are found
_notes: int | None = None  # where this process writes what the host's agent should know


def begin(notes: int) -> None:
    """This rank is watched from here on. notes: the file descriptor by which it lets the agent know"""
    global _notes
    _notes = notes


def note(**what: Any) -> None:
    """Let the agent know something of this rank: told, follows, stage, marker, waits, done. Without `launch`: nothing."""
    if _notes is not None:
        with suppress(OSError):
            os.write(_notes, json.dumps(what).encode() + b"\n")


def is_watched() -> bool:
    """Whether `launch` started this rank, and watches it."""
    return _notes is not None
