"""Host memory as a place for files that a disk is still to get: a directory in /dev/shm, and how much it may hold."""

import atexit
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
SHARE = 0.5  # of what is free: training goes on beside it
_PREFIX = "brigade-"
_locks: dict[Path, Any] = {}  # of the directories that this process made; the system unlocks them when it ends


def room() -> int:
    """Bytes that a checkpoint may take here: half of what the file system, the host and this process's cgroups have free; what
    lies in /dev/shm counts as memory of the cgroup. 0 where there is no /dev/shm."""
    try:
        space = os.statvfs(MEMORY)
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = [space.f_bavail * space.f_frsize, int(meminfo["MemAvailable"].split()[0]) * 1024]
    except (OSError, KeyError):
        return 0
    return int(SHARE * min(free + _free_in_cgroups()))


def make(name: str) -> Path:
    """A new directory that is gone when this process ends, or when the next one on this host makes its own."""
    _remove_those_of_the_dead()
    hidden, folder = MEMORY / f".{_PREFIX}{name}", MEMORY / f"{_PREFIX}{name}"
    hidden.mkdir(mode=0o700)
    lock = (hidden / ".lock").open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    hidden.rename(folder)
    _locks[folder] = lock
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def path(name: str) -> Path:
    """Of the directory that another process of this host made."""
    return MEMORY / f"{_PREFIX}{name}"


def _remove_those_of_the_dead() -> None:
    """Only a process that was killed while it wrote leaves more than empty directories: gigabytes of memory."""
    for lock in MEMORY.glob(f"{_PREFIX}*/.lock"):
        # Closing a file gives up this process's own lock on it, and a link of others may lead to such a file.
        if lock.parent in _locks or lock.is_symlink():
            continue
        with suppress(OSError), lock.open("r+") as file:  # another user's; or one whose owner lives
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _free_in_cgroups() -> list[int]:
    """Bytes that each cgroup with a limit, from this process's own up to the root, has left; file caches count as free."""
    free = []
    for limit, used, stat, name, groups in _memory_groups():
        for group in (groups, *groups.parents):
            with suppress(OSError, ValueError):  # "max": none
                kept = dict(line.split() for line in (group / stat).read_text().splitlines())
                left = int((group / limit).read_text()) - int((group / used).read_text())
                free.append(left + int(kept.get(name, 0)))
            if group == CGROUPS:
                break
    return free


def _memory_groups() -> list[tuple[str, str, str, str, Path]]:
    """Version 2's and 1's names of files, and this process's directory."""
    two = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, within = line.split(":", 2)
            if not controllers:
                found.append((*two, CGROUPS / within.lstrip("/")))
            elif "memory" in controllers.split(","):
                found.append((*one, CGROUPS / "memory" / within.lstrip("/")))
    return found
