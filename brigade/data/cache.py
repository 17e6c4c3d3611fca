"""The cache of derived files: each made once per host and content, whole or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import writing


def cache_directory() -> Path:
    """Where derived files lie: $BRIGADE_CACHE, or ~/.cache/brigade."""
    return Path(os.environ.get("BRIGADE_CACHE", "~/.cache/brigade")).expanduser()


def once(folder: Path, whole: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """`folder`, built aside and moved into place if `whole` does not hold of it. One process of the host builds, the
    others wait; what a killed one left behind is swept away."""
    from filelock import FileLock

    if whole(folder):
        return folder
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if whole(folder):
                return folder
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                with writing(folder.parent):  # told before what lies aside is removed: so few bytes were free
                    build(aside)
                aside.chmod(0o755)
                shutil.rmtree(folder, ignore_errors=True)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder


def digest(path: Path) -> str:
    """SHA-256 of a file's content, remembered by its path, size and time of change: a host hashes it once."""
    stat = path.stat()
    key = hashlib.sha256(repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)).encode()).hexdigest()
    known = cache_directory() / "digests" / key
    try:
        return known.read_text()
    except OSError:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        with suppress(OSError):  # then it is hashed again
            known.parent.mkdir(parents=True, exist_ok=True)
            partial = known.with_name(f".{key}-{os.getpid()}")
            partial.write_text(found)
            partial.replace(known)
        return found
