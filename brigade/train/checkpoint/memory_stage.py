"""Host memory as a place for files that are still to be copied to a disk: a directory in /dev/shm, and how much it may hold."""

import atexit
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..host import control_groups

MEMORY = Path("/dev/shm")
SHARE = 0.5  # of what is free, because training goes on beside it
_PREFIX = "brigade."  # earlier versions lock in another way, and remove what begins with brigade-


def room() -> int:
    """The bytes that a checkpoint may take here: half of what the file system, the host and this process's control groups have
    free, for files in /dev/shm count as a group's memory. 0 where there is no /dev/shm."""
    try:
        space, left = os.statvfs(MEMORY), control_groups.memory_left()
    except (OSError, KeyError):
        return 0
    return int(SHARE * min(space.f_bavail * space.f_frsize, left["available"]))


def make(name: str) -> IO[str]:
    """Make a directory that is removed when this process ends, or when the next one on this host makes its own. Return the file
    whose lock says that it is in use: keep it open."""
    _remove_those_of_the_dead()
    hidden, folder = MEMORY / f".{_PREFIX}{name}", path(name)
    hidden.mkdir(mode=0o700)
    lock = (hidden / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # of this open file, so that no other one of this process gives it up
    hidden.rename(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return lock


def path(name: str) -> Path:
    """The path of a directory that another process on this host made."""
    return MEMORY / f"{_PREFIX}{name}"


def _remove_those_of_the_dead() -> None:
    """Remove directories whose process has ended. One that was killed while it wrote leaves gigabytes of memory in use."""
    for lock in MEMORY.glob(f"{_PREFIX}*/.lock"):
        if lock.is_symlink():  # another user's, to a file whose lock closing it would give up (run/owner.py)
            continue
        with suppress(OSError), lock.open("r+") as file:  # it is another user's, or its process is alive
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
