"""What a host's processors, memory and limits are. Needs only the standard library."""

import os
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...hosts import Facts
from ...train.host import control_groups

LIMITS = {  # of a process, by the letter of `ulimit`
    "f": resource.RLIMIT_FSIZE,
    "v": resource.RLIMIT_AS,
    "d": resource.RLIMIT_DATA,
    "u": resource.RLIMIT_NPROC,
    "t": resource.RLIMIT_CPU,
}
IPC_LOCK = 14  # CAP_IPC_LOCK of linux/capability.h
SHM = "/dev/shm"
WORK = 5_000_000  # products of core_speed(): a third of a second on a core of 2023


def host() -> Facts:
    """What a process of this user may use here, container and batch system included.

    cores: that it may use, memory: bytes it may use and bytes that are free, shm: of /dev/shm, None where it is no file system
    of its own; shm_fails: why no file can be made there, "" where one can; limits: letter of LIMITS -> the soft limit, in bytes,
    processes or seconds, of those that hold
    open_files: soft and hard limit, locked_memory: bytes; None: unlimited, or this user may lock what it likes (CAP_IPC_LOCK)
    infiniband: names of the adapters, verbs: whether programs can use them, ib_off: the environment takes NCCL away from them
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": control_groups.cores(),
        "memory": control_groups.memory_left(),
        "shm": _room(SHM),
        "shm_fails": _fails(SHM),
        "limits": {letter: soft for letter, soft in _limits() if soft != resource.RLIM_INFINITY},
        "open_files": [soft, hard],
        "locked_memory": None if locked == resource.RLIM_INFINITY or _may_lock() else locked,
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "verbs": any(Path("/dev/infiniband").glob("uverbs*")),
        "ib_off": os.environ.get("NCCL_IB_DISABLE", "0") != "0" or os.environ.get("NCCL_NET") == "Socket",
    }


def core_speed(pieces: int) -> Facts:
    """The least of the seconds that a fixed amount of arithmetic takes on one core: of the clock, and the processor's own of the
    same piece. Whoever disturbs a host now and then leaves one piece whole; and a piece is longer than a scheduler's period
    (0.1 s), so that a host which may compute half of the time is slow in each one."""
    found = []
    for _ in range(pieces):
        began, computed = time.perf_counter(), time.process_time()
        number = 1
        for _ in range(WORK):
            number = (number * 1103515245 + 12345) & 0x7FFFFFFF
        found.append((time.perf_counter() - began, time.process_time() - computed))
    seconds, computing = min(found)
    return {"seconds": seconds, "computing": computing}


def _may_lock() -> bool:
    """Tell whether limits of locked memory do not hold for this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> IPC_LOCK & 1)


def _limits() -> Iterator[tuple[str, int]]:
    """Yield each letter of LIMITS and its soft limit. Linux does not count processes of root."""
    for letter, limit in LIMITS.items():
        if letter != "u" or os.geteuid() != 0:
            yield letter, resource.getrlimit(limit)[0]


def _fails(folder: str) -> str:
    """Why no file can be made in a folder, "" where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()


def _room(path: str) -> dict[str, int] | None:
    """total and free bytes of a file system; None where there is none of its own."""
    with suppress(OSError):
        if Path(path).is_mount():
            found = os.statvfs(path)
            return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}
    return None
