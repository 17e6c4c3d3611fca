"""What a host's processors, memory and limits are. By the standard library alone; probes/nvml.py has the GPUs."""

import os
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)")
WORK = 2_500_000  # products of core_speed(): a fifth of a second on a core of 2023


def host() -> dict[str, Any]:
    """As a process of this user sees it, container and batch system included.

    cores: that it may use, memory: bytes it may use and bytes that are free, shm: of /dev/shm, None without one
    open_files: soft and hard limit, locked_memory: bytes; None: unlimited; infiniband: names of the adapters
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": _cores(),
        "memory": _memory(),
        "shm": _room("/dev/shm"),
        "open_files": [soft, hard],
        "locked_memory": None if locked == resource.RLIM_INFINITY else locked,
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
    }


def core_speed(pieces: int) -> dict[str, Any]:
    """Median of the seconds that a fixed amount of arithmetic takes on one core: of the clock, and of the processor's own. Each
    piece is longer than a scheduler's period, or a host that may compute half of the time would look whole."""
    clock, own = [], []
    for _ in range(pieces):
        began, computed = time.perf_counter(), time.process_time()
        number = 1
        for _ in range(WORK):
            number = (number * 1103515245 + 12345) & 0x7FFFFFFF
        clock.append(time.perf_counter() - began)
        own.append(time.process_time() - computed)
    return {"seconds": statistics.median(clock), "computing": statistics.median(own)}


def kernel_log() -> dict[str, Any]:
    """xids: [{bus, xid, age}] of the kernel log since boot, age in seconds; or unreadable: why."""
    try:
        lines = list(_kernel_messages())
    except OSError as error:
        refused = f"/dev/kmsg: {error.strerror}"
        lines = list(_journal())
        if not lines:
            return {"unreadable": refused}
    found = ((age, _XID.search(text)) for age, text in lines)
    return {"xids": [{"bus": xid[1], "xid": int(xid[2]), "age": round(age)} for age, xid in found if xid]}


def _kernel_messages() -> Iterator[tuple[float, str]]:
    """Age and text of each message that the kernel still has. Raises OSError where this user may not read them."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        while True:
            try:
                head, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
            except BrokenPipeError:  # overwritten meanwhile; the next read has the oldest that is left
                continue
            except BlockingIOError:
                return
            yield now - int(head.split(",")[2]) / 1e6, text
    finally:
        os.close(log)


def _journal() -> Iterator[tuple[float, str]]:
    command = ["journalctl", "--dmesg", "--boot", "--output=short-unix", "--no-pager", "--quiet"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(command, capture_output=True, text=True, timeout=8).stdout.splitlines():
            stamp, _, text = line.partition(" ")
            yield time.time() - float(stamp), text


def _cores() -> float:
    """Cores that this process may use: its affinity, and what its control groups allow."""
    found = [float(len(os.sched_getaffinity(0)))]
    for text in _control_group("cpu", "cpu.max"):  # version 2: "200000 100000", or "max 100000"
        quota, _, period = text.partition(" ")
        if quota != "max":
            found.append(int(quota) / int(period))
    periods = list(_control_group("cpu", "cpu.cfs_period_us"))
    for quota, period in zip(_control_group("cpu", "cpu.cfs_quota_us"), periods, strict=False):
        if int(quota) > 0:
            found.append(int(quota) / int(period))
    return min(found)


def _memory() -> dict[str, int]:
    """total, available: bytes; the control groups' limits count."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        pairs = zip(_control_group("memory", limit), _control_group("memory", used), strict=False)
        for most, now in pairs:
            if most != "max" and int(most) < total:
                total, available = int(most), min(available, int(most) - int(now))
    return {"total": total, "available": max(available, 0)}


def _control_group(controller: str, file: str) -> Iterator[str]:
    """What a file says in this process's control group and in each one above it, in both versions of control groups."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            inside = root / path.lstrip("/")
            for folder in [inside, *(above for above in inside.parents if above.is_relative_to(root))]:
                with suppress(OSError):
                    yield (folder / file).read_text().strip()


def _room(path: str) -> dict[str, int] | None:
    """total and free bytes of a file system; None where there is none of its own."""
    with suppress(OSError):
        if Path(path).is_mount():
            found = os.statvfs(path)
            return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}
    return None
