"""What a rank lets `launch` know of itself, where that started it (launched.py)."""

import json
import os
from contextlib import suppress

RUN = "BRIGADE_RUN"  # in the environment of every process of a launch: its name, by which all of them are found


class Agent:
    """The host's agent, as a rank of a launch knows it: nobody where `launch` did not start this process."""

    def __init__(self) -> None:
        self._notes: int | None = None

    def begin(self, notes: int) -> None:
        """This rank is watched from here on. notes: the file descriptor by which it lets the agent know"""
        self._notes = notes

    def note(self, **what: object) -> None:
        """Let the agent know something of this rank: told, follows, stage, marker, waits, done. Without `launch`: nothing."""
        if self._notes is not None:
            with suppress(OSError):
                os.write(self._notes, json.dumps(what).encode() + b"\n")

    @property
    def watches(self) -> bool:
        """Whether `launch` started this rank, and watches it."""
        return self._notes is not None
