"""What a rank lets `launch` know of itself, where that started it (launched.py)."""

import json
import os
from contextlib import suppress
from typing import Any

RUN = "BRIGADE_RUN"  # in the environment of every process of a launch: its name, by which all of them are found
notes: int | None = None  # where this process writes what the host's agent should know


def note(**what: Any) -> None:
    """Let the agent know something of this rank: told, follows, stage, marker, waits, done. Without `launch`: nothing."""
    if notes is not None:
        with suppress(OSError):
            os.write(notes, json.dumps(what).encode() + b"\n")


def is_watched() -> bool:
    """Whether `launch` started this rank, and watches it."""
    return notes is not None
