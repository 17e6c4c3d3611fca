"""What the control groups of this process (a container, a batch job) say, in both versions. Needs only the standard library."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMINFO = Path("/proc/meminfo")
# Of a control group's memory.stat, what the kernel gives up when memory is wanted. Version 1 has them for the groups below too
# with total_ before the name; usage counts those.
RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
# (limit, what is held): of version 2, where memory.high makes processes wait and memory.max ends them, and of version 1.
_MEMORY_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def read(controller: str, *files: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield what these files say in this process's control group and in each one above it that has them all; and where."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            inside = root / path.lstrip("/")
            for folder in [inside, *(above for above in inside.parents if above.is_relative_to(root))]:
                with suppress(OSError):
                    yield folder, [(folder / file).read_text().strip() for file in files]


def cores() -> float:
    """Return the cores that this process may use: its affinity, and what its control groups allow."""
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [float(every)]
    for _, (text,) in read("cpu", "cpu.max"):  # version 2: "200000 100000", or "max 100000"
        quota, _, period = text.partition(" ")
        if quota != "max":
            found.append(int(quota) / int(period))
    for _, (quota, period) in read("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        if int(quota) > 0:
            found.append(int(quota) / int(period))
    return min(found)


def memory() -> int:
    """Return the bytes of memory that this process may use: the host's, and what its control groups allow."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory.limit_in_bytes"):  # of versions 2 and 1
        found += [int(text) for _, (text,) in read("memory", file) if text != "max"]
    return min(found)


def memory_left() -> dict[str, Any]:
    """total, available: bytes; the control groups' limits count. What they hold of files is available: the kernel drops it.

    limit: the file of the control group that leaves the fewest bytes, "" where the machine itself does. A group counts what
    those below it hold, so one above this process's own may be full because of others.
    """
    lines = MEMINFO.read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    least = ""
    for limit, used in _MEMORY_LIMITS:
        for folder, (most, now, counts) in read("memory", limit, used, "memory.stat"):
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
