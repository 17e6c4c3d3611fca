"""What a host's disks and its clock say. Needs only the standard library."""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...hosts import Facts

PATIENCE = 5.0  # seconds for a network file system to show a file that another host has written
NOTE, RATE = ".check-", ".check-rate-"  # how the names of all files begin that this leaves for a moment
CACHE = "~/.cache/brigade"
BLOCK = 4 * 2**20  # bytes that are written at a time


def clock() -> Facts:
    """Seconds since the epoch, on this host's clock."""
    return {"time": time.time()}


def note(directory: str, token: str, host: str, missing: list[str]) -> Iterator[Facts]:
    """Leave a file in a directory, which is made where it is missing, until this is released. Then all is as it was.

    missing: of room(), asked before any host made one; the host that leaves last removes them
    error: why it cannot be written; free, size: bytes of its disk; file: what of its path is no directory, ""
    """
    where = Path(directory)
    file = where / f"{NOTE}{token}-{host}"
    facts: Facts = {}
    try:
        try:
            where.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            facts["error"] = error.strerror or str(error)
        yield facts | room(directory) | {"file": _file_of(where)}
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        _remove(missing)


def _file_of(path: Path) -> str:
    """The part of a path that is there and no directory, "" where none is."""
    return next((str(part) for part in (path, *path.parents) if _exists(part) and not part.is_dir()), "")


def _exists(path: Path) -> bool:
    """Tell whether it can be seen that it exists."""
    with suppress(OSError):
        return path.exists()
    return False


def _remove(directories: list[str]) -> None:
    """Directories that were not there before: the deepest first, and only empty ones. Somebody else may be there."""
    for path in directories:
        with suppress(OSError):
            Path(path).rmdir()


def notes(directory: str, token: str, wanted: int) -> Facts:
    """The hosts whose files are seen here. Listing a directory asks an NFS server anew, where looking for a name may not."""
    deadline, begins = time.monotonic() + PATIENCE, f"{NOTE}{token}-"
    while True:
        seen = []
        with suppress(OSError):
            seen = [path.name.removeprefix(begins) for path in Path(directory).glob(f"{begins}*")]
        if len(seen) >= wanted or time.monotonic() > deadline:
            return {"seen": seen}
        time.sleep(0.1)


def room(directory: str) -> Facts:
    """Bytes that this user may still write where a directory is, or would be; of how many (0: nothing is ever kept there, as in
    /proc, or its file system does not say); how many files (inodes), None where there is no limit; what of its path is missing;
    how many checkpoints lie in it."""
    path = Path(directory)
    missing = [str(folder) for folder in (path, *path.parents) if not _exists(folder)]
    there = next(folder for folder in (path, *path.parents) if _exists(folder))
    disk = os.statvfs(there)
    found: Facts = {
        "free": disk.f_bavail * disk.f_frsize,
        "size": disk.f_blocks * disk.f_frsize,
        "missing": missing,
    }
    found["inodes"] = disk.f_favail if disk.f_files else None
    return found | {"checkpoints": _checkpoints(path)}


def _checkpoints(directory: Path) -> int:
    with suppress(OSError):
        return sum(path.name.rpartition("-")[2].isdecimal() for path in directory.glob("checkpoint-*"))
    return 0


def rooms(directories: list[str], start: str) -> Facts:
    """room() of each, and of "cache" and "tmp" with their `path`: where this host's environment puts them.

    tmp has besides "passed_by": a directory that is named for it, TMPDIR or /tmp, and cannot be written; "" for none. Its path is
    "" where nothing else can be, either.
    start: the directory in which ranks start, for what is named from there
    """
    # As brigade/train/host/cache.py has it.
    cache = Path(start, Path(os.environ.get("BRIGADE_CACHE") or CACHE).expanduser())
    path, passed_by = _tmp()
    found = {"cache": room(str(cache)) | {"path": str(cache)}}
    found["tmp"] = room(str(Path(start, path))) | {"path": path and str(Path(start, path)), "passed_by": passed_by}
    return found | {directory: room(directory) for directory in directories}


def _tmp() -> tuple[str, str]:
    """The directory for temporary files, "" for none, and one before it that cannot be written. As tempfile.gettempdir(), which
    passes by one that is full, and here is to be seen."""
    named = [*filter(None, (os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))), "/tmp"]
    usable = [path for path in named if Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)]
    passed_by = "" if usable[:1] == named[:1] else named[0]
    if not usable:
        with suppress(OSError):
            usable = [tempfile.gettempdir()]
    return (usable[0] if usable else ""), passed_by


def rate(directory: str, token: str, host: str, missing: list[str], duration: float, most: int) -> Facts:
    """Write a file for `duration` seconds, or `most` bytes, bring it to the disk, and read it past the memory's copy.

    written, read: bytes per second; error: why it cannot be written. The file is removed.
    """
    where = Path(directory)
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
        _remove(missing)


def _read(file: Path, seconds: float) -> Facts:
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
