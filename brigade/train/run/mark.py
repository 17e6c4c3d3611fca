"""The mark by which a run knows its output directory again.

A file system that is unmounted in mid-run leaves an empty directory of the host's own disk behind, or nothing. Whatever a rank
made or wrote there would look like the run's, and nobody else would see it.
"""

import time
from contextlib import suppress
from pathlib import Path

from ...errors import UserError, Whose
from ..host import files

FILE = ".mark"  # in the output directory: a token that each start of a run draws anew, the same on all hosts
PATIENCE = 5.0  # seconds for a network file system to show what another host has written

_OTHER = "another run has begun in it"


def check(directory: Path, token: str, host: str) -> None:
    """Raise UserError where `directory` is no longer the one in which the run began, as this host sees it.

    token: what the run wrote there when it began; "" for a run that has no directory yet
    """
    deadline = time.monotonic() + PATIENCE
    while token and (why := _problem(directory, token)):
        if time.monotonic() > deadline:
            problem = f"on {host} this is no longer the directory that the run began in: {why}"
            whose: Whose = "user" if why == _OTHER else "host"
            raise UserError(str(directory), problem, cure(host), whose)
        time.sleep(0.1)
        with suppress(OSError):
            list(directory.iterdir())  # asks an NFS server anew, where opening a known name may not


def cure(host: str) -> str:
    """What helps where a host has lost sight of the output directory."""
    return f"see that its file system is mounted on {host}; the same command continues from the newest whole checkpoint"


def _problem(directory: Path, token: str) -> str | None:
    try:
        return None if files.read_text(directory / FILE, files.LINE, "replace") == token else _OTHER
    except OSError as error:
        return f"{FILE}: {error.strerror}"
