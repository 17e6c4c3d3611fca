"""What a host's disks and its clock say. By the standard library alone."""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 5.0  # seconds for a network file system to show a file that another host has written
NOTE, RATE = ".check-", ".check-rate-"  # how the names of all files begin that this leaves for a moment
BLOCK = 4 * 2**20  # bytes that are written at a time


def clock() -> dict[str, Any]:
    """Seconds since the epoch, on this host's clock."""
    return {"time": time.time()}


def note(directory: str, token: str, host: str) -> Iterator[dict[str, Any]]:
    """Leave a file in a directory, which is made where it is missing, until this is released. Then all is as it was.

    error: why it cannot be written; free, size: bytes of its disk
    """
    where = Path(directory)
    made = [path for path in (where, *where.parents) if not path.exists()]
    file = where / f"{NOTE}{token}-{host}"
    facts: dict[str, Any] = {}
    try:
        try:
            where.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            facts["error"] = error.strerror or str(error)
        yield facts | room(directory)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        _remove_empty(made)


def _remove_empty(made: list[Path]) -> None:
    """Directories that were made here. Others may have their notes in them for another moment: whoever made them waits."""
    deadline = time.monotonic() + 1.5
    for path in made:
        while path.exists() and time.monotonic() < deadline:
            try:
                path.rmdir()
            except OSError:
                time.sleep(0.02)


def notes(directory: str, token: str, wanted: int) -> dict[str, Any]:
    """The hosts whose files are seen here. Listing a directory asks an NFS server anew, where looking for a name may not."""
    deadline, begins = time.monotonic() + PATIENCE, f"{NOTE}{token}-"
    while True:
        seen = []
        with suppress(OSError):
            seen = [path.name.removeprefix(begins) for path in Path(directory).glob(f"{begins}*")]
        if len(seen) >= wanted or time.monotonic() > deadline:
            return {"seen": seen}
        time.sleep(0.1)


def room(directory: str) -> dict[str, Any]:
    """Bytes that this user may still write where a directory is, or would be; of how many; and the disk's number."""
    path = Path(directory).expanduser()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    disk = os.statvfs(there)
    return {"free": disk.f_bavail * disk.f_frsize, "size": disk.f_blocks * disk.f_frsize, "disk": there.stat().st_dev}


def rooms(directories: list[str]) -> dict[str, Any]:
    """room() of each."""
    return {directory: room(directory) for directory in directories}


def rate(directory: str, token: str, host: str, duration: float, most: int) -> dict[str, Any]:
    """Write a file for `duration` seconds, or `most` bytes, bring it to the disk, and read it past the memory's copy.

    written, read: bytes per second; error: why it cannot be written. The file is removed.
    """
    where = Path(directory)
    made = [path for path in (where, *where.parents) if not path.exists()]
    file, size = where / f"{RATE}{token}-{host}", 0
    block = os.urandom(BLOCK)  # a file system that compresses would write zeros at once
    try:
        where.mkdir(parents=True, exist_ok=True)
        with file.open("wb", buffering=0) as out:
            began = time.monotonic()
            while size < most and time.monotonic() - began < duration:
                size += out.write(block)
            os.fsync(out.fileno())
            written = size / (time.monotonic() - began)
        return {"written": written, **_read(file, duration)}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _read(file: Path, seconds: float) -> dict[str, Any]:
    """direct: whether the memory's copy was passed by; a tmpfs, for one, has no other."""
    try:
        descriptor, direct = os.open(file, os.O_RDONLY | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        descriptor, direct = os.open(file, os.O_RDONLY), False
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        size, began = 0, time.monotonic()
        with mmap.mmap(-1, BLOCK) as aligned:  # as O_DIRECT wants it
            while time.monotonic() - began < seconds and (got := os.readv(descriptor, [aligned])):
                size += got
        return {"read": size / (time.monotonic() - began), "direct": direct}
    finally:
        os.close(descriptor)
