"""Host memory as a place for files that are still to be copied to a disk: a directory in /dev/shm, and how much it may hold."""

import atexit
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
SHARE = 0.5  # of what is free, because training goes on beside it
_PREFIX = "brigade-"
_locks: dict[Path, Any] = {}  # for the directories that this process made; the system unlocks them when it ends


def room() -> int:
    """The bytes that a checkpoint may take here: half of what the file system, the host and this process's cgroups have free, for
    files in /dev/shm count as a cgroup's memory. 0 where there is no /dev/shm."""
    try:
        space = os.statvfs(MEMORY)
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = [space.f_bavail * space.f_frsize, int(meminfo["MemAvailable"].split()[0]) * 1024]
    except (OSError, KeyError):
        return 0
    return int(SHARE * min(free + _free_in_cgroups()))


def make(name: str) -> Path:
    """Make a directory that is removed when this process ends, or when the next one on this host makes its own."""
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
    """The path of a directory that another process on this host made."""
    return MEMORY / f"{_PREFIX}{name}"


def _remove_those_of_the_dead() -> None:
    """Remove directories whose process has ended. One that was killed while it wrote leaves gigabytes of memory in use."""
    for lock in MEMORY.glob(f"{_PREFIX}*/.lock"):
        # Closing a file gives up this process's own lock on it, and another user's link may lead to such a file.
        if lock.parent in _locks or lock.is_symlink():
            continue
        with suppress(OSError), lock.open("r+") as file:  # it is another user's, or its process is alive
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _free_in_cgroups() -> list[int]:
    """The bytes left in each cgroup with a limit, from this process's own up to the root. File caches count as free."""
    free = []
    for limit, used, stat, name, groups in _memory_groups():
        for group in (groups, *groups.parents):
            with suppress(OSError, ValueError):  # "max": no limit
                kept = dict(line.split() for line in (group / stat).read_text().splitlines())
                left = int((group / limit).read_text()) - int((group / used).read_text())
                free.append(left + int(kept.get(name, 0)))
            if group == CGROUPS:
                break
    return free


def _memory_groups() -> list[tuple[str, str, str, str, Path]]:
    """For each hierarchy that counts this process's memory: the names of its files, and the process's directory."""
    two = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    groups = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, within = line.split(":", 2)
            if not controllers:
                groups.append((*two, CGROUPS / within.lstrip("/")))
            elif "memory" in controllers.split(","):
                groups.append((*one, CGROUPS / "memory" / within.lstrip("/")))
    return groups
