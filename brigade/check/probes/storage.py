"""What a host's disks and its clock say. By the standard library alone. Nothing of this stays behind, whatever ends it."""

import glob
import mmap
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

BLOCK = 8 * 2**20  # bytes that are written at a time
SHARE = 0.1  # of what is free, which a measurement takes at most
LISTED = 10_000  # files of a pattern or directory that are counted
SEEN = 5.0  # seconds for a network file system to show a file that another host has written (distributed/shared_directory.py)


def clock() -> dict[str, Any]:
    """Seconds since the epoch, on this host's clock."""
    return {"time": time.time()}


def files(names: list[list[str]]) -> dict[str, Any]:
    """names: of each file, pattern or directory the paths that it may mean, of which the first that is there counts

    found: for each, number of its files and their bytes, or None where nothing is there
    """
    return {"found": [next((one for path in paths if (one := _size(path))), None) for paths in names]}


def _size(pattern: str) -> dict[str, int] | None:
    count = size = 0
    for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207
        inside = Path(path).rglob("*") if Path(path).is_dir() else [Path(path)]
        for file in inside:
            with suppress(OSError):
                if file.is_file() and os.access(file, os.R_OK):
                    count, size = count + 1, size + file.stat().st_size
            if count >= LISTED:
                return {"files": count, "bytes": size}
    return {"files": count, "bytes": size} if count else None


def room(directory: str, cache: str = "BRIGADE_CACHE") -> dict[str, Any]:
    """Of the output directory and of the cache: free bytes (what a quota leaves is not known), where they will be written

    there: the output directory, or where it is missing the directory in which it would be made; writable: whether this user may
    kept: bytes of checkpoints that lie in the output directory
    """
    output, store = Path(directory), Path(os.environ.get(cache, "~/.cache/brigade")).expanduser()
    there = existing(output)
    kept = [_size(str(path)) or {"bytes": 0} for path in output.glob("checkpoint-*")]
    return {
        "there": str(there),
        "writable": os.access(there, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(there).free,
        "kept": sum(one["bytes"] for one in kept),
        "cache": str(store),
        "cache_free": shutil.disk_usage(existing(store)).free,
    }


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def note(directory: str, token: str, host: str) -> Iterator[dict[str, Any]]:
    """Leave a file in a directory until the block ends. error: why that cannot be"""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows tidies up
    path = Path(directory, f".brigade-check-{token}-{host}")
    try:
        try:
            path.touch()
        except OSError as error:
            yield {"error": error.strerror}
        else:
            yield {}
    finally:
        path.unlink(missing_ok=True)


def notes(directory: str, token: str, wanted: int) -> dict[str, Any]:
    """Whose notes are seen here. Listing a directory asks an NFS server anew, where looking for a name may not."""
    deadline, start = time.monotonic() + SEEN, f".brigade-check-{token}-"
    while True:
        seen = [path.name.removeprefix(start) for path in Path(directory).glob(f"{start}*")]
        if len(seen) >= wanted or time.monotonic() > deadline:
            return {"seen": sorted(seen)}
        time.sleep(0.1)


def rates(directory: str, size: int, seconds: float) -> dict[str, Any]:
    """Write a file of `size` bytes, or what can be written in `seconds`, sync it, and read it again past the page cache.

    write, read: bytes per second; bytes: of the file; direct: whether O_DIRECT went past the cache (else POSIX_FADV_DONTNEED)
    error: why nothing was measured. The file has no name, so it is gone when this process is, however that ends.
    """
    try:
        file = _nameless(directory)
    except OSError as error:
        return {"error": error.strerror}
    try:
        direct = _is_direct(file)
        block = mmap.mmap(-1, BLOCK)  # aligned, as O_DIRECT wants it
        block.write(secrets.token_bytes(BLOCK))  # what cannot be compressed
        size = min(size, int(SHARE * shutil.disk_usage(directory).free)) // BLOCK * BLOCK
        began = time.monotonic()
        written = 0
        while written < size and time.monotonic() - began < seconds:
            written += os.write(file, block)
        os.fsync(file)
        wrote = time.monotonic() - began
        if not written:
            return {"error": "there is no room for a file to measure with"}
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began, offset = time.monotonic(), 0
        while offset < written and time.monotonic() - began < seconds:
            got = os.preadv(file, [block], offset)
            if not got:
                break
            offset += got
        read = time.monotonic() - began
        return {"write": written / wrote, "read": offset / max(read, 1e-9), "bytes": written, "direct": direct}
    except OSError as error:
        return {"error": error.strerror}
    finally:
        os.close(file)


def _nameless(directory: str) -> int:
    """An open file without a name: by O_TMPFILE, or where the file system knows none (NFS) unlinked at once."""
    with suppress(OSError):
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    path = Path(directory, f".brigade-check-{secrets.token_hex(8)}")
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    path.unlink()
    return file


def _is_direct(file: int) -> bool:
    import fcntl

    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:  # tmpfs, some network file systems
        return False
    return True
