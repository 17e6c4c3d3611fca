"""What a host's processors, memory and limits are. Needs only the standard library."""

import os
import re
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...train import control_groups

IPC_LOCK = 14  # CAP_IPC_LOCK of linux/capability.h
# Of a control group's memory.stat, what the kernel gives up when memory is wanted. Version 1 has them for the groups below too
# with total_ before the name; usage counts those.
RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
# (limit, what is held): of version 2, where memory.high makes processes wait and memory.max ends them, and of version 1.
_MEMORY_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
WORK = 5_000_000  # products of core_speed(): a third of a second on a core of 2023


def host() -> dict[str, Any]:
    """What a process of this user may use here, container and batch system included.

    cores: that it may use, memory: bytes it may use and bytes that are free, shm: of /dev/shm, None without one
    open_files: soft and hard limit, locked_memory: bytes; None: unlimited, or this user may lock what it likes (CAP_IPC_LOCK)
    infiniband: names of the adapters, verbs: whether programs can use them, ib_off: the environment takes NCCL away from them
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": control_groups.cores(),
        "memory": _memory(),
        "shm": _room("/dev/shm"),
        "open_files": [soft, hard],
        "locked_memory": None if locked == resource.RLIM_INFINITY or _may_lock() else locked,
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "verbs": any(Path("/dev/infiniband").glob("uverbs*")),
        "ib_off": os.environ.get("NCCL_IB_DISABLE", "0") != "0" or os.environ.get("NCCL_NET") == "Socket",
    }


def core_speed(pieces: int) -> dict[str, Any]:
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


def _memory() -> dict[str, Any]:
    """total, available: bytes; the control groups' limits count. What they hold of files is available: the kernel drops it.

    limit: the file of the control group that leaves the fewest bytes, "" where the machine itself does. A group counts what
    those below it hold, so one above this process's own may be full because of others.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    least = ""
    for limit, used in _MEMORY_LIMITS:
        for folder, (most, now, counts) in control_groups.read("memory", limit, used, "memory.stat"):
            if most == "max" or int(most) >= sizes["MemTotal"]:
                continue
            left = int(most) - max(int(now) - _reclaimable(counts), 0)
            total = min(total, int(most))
            if left < available:
                available, least = left, f"{folder}/{limit}"
    return {"total": total, "available": max(available, 0), "limit": least}


def _reclaimable(counts: str) -> int:
    """counts: a memory.stat. Bytes"""
    sizes = {name: int(size) for name, size in (line.split() for line in counts.splitlines())}
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in RECLAIMABLE)


def _may_lock() -> bool:
    """Tell whether limits of locked memory do not hold for this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> IPC_LOCK & 1)


def _room(path: str) -> dict[str, int] | None:
    """total and free bytes of a file system; None where there is none of its own."""
    with suppress(OSError):
        if Path(path).is_mount():
            found = os.statvfs(path)
            return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}
    return None
