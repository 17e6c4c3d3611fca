"""The cache of derived files: each made once per host and content, whole or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_directory() -> Path:
    """Where derived files lie: $BRIGADE_CACHE, or ~/.cache/brigade."""
    return Path(os.environ.get("BRIGADE_CACHE", "~/.cache/brigade")).expanduser()


def once(folder: Path, is_whole: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """`folder`, built aside and moved into place unless it is there and whole. One process of the host builds, the
    others wait; what a killed one left behind is removed."""
    if is_whole(folder):
        return folder
    from filelock import FileLock

    from .errors.disk import writing

    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if is_whole(folder):
                return folder
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                with writing(folder.parent):  # said before what lies aside is removed: so few bytes were free
                    build(aside)
                aside.chmod(0o755)
                shutil.rmtree(folder, ignore_errors=True)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder


def digest(path: Path) -> str:
    """SHA-256 of a file's content: a host hashes it once."""

    def of_content() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return remembered(stamp(path), of_content)


def stamp(path: Path) -> tuple[Any, ...]:
    """What changes when a file's content does: path, size, time of change, inode."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


def remembered(key: Any, find: Callable[[], str], holds: Callable[[str], bool] = bool) -> str:
    """The text that was found for a key, which is told by its repr; found anew where there is none for which `holds`."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    known = cache_directory() / "digests" / name
    with suppress(OSError):
        if (text := known.read_text()) and holds(text):  # empty after a crash of the host
            return text
    text = find()
    with suppress(OSError):  # then it is found again
        known.parent.mkdir(parents=True, exist_ok=True)
        partial = known.with_name(f".{name}-{os.getpid()}")
        partial.write_text(text)
        partial.replace(known)
    return text
