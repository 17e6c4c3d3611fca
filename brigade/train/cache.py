"""The cache of derived files: each made once per host and content, whole or not at all.

What lies there is believed (tokens are trained, launches are known), so it is one user's: made with mode 0700, and refused where
it is another's or others may write to it. Hosts of one user may share it.
"""

import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..errors.disk import writing
from . import files

ROOT = 0
CURE = "export BRIGADE_CACHE with a directory of your own"


def cache_directory(*inside: str) -> Path:
    """Where derived files lie: $BRIGADE_CACHE, or ~/.cache/brigade; or a folder in it. Raises UserError where others could have
    written what is there."""
    folder = Path(os.environ.get("BRIGADE_CACHE", "~/.cache/brigade")).expanduser()
    for part in ("", *inside):
        folder = folder / part
        _check(folder)
    return folder


def private_folder(folder: Path) -> Path:
    """A folder of the cache, made with mode 0700 where it is missing. Raises UserError where others could have written what is
    there; OSError."""
    there = folder.resolve()  # behind a link to a disk that was emptied since
    missing = [part for part in (there, *there.parents) if not part.exists()]
    for part in reversed(missing):  # mkdir(parents=True) makes those between by the umask
        part.mkdir(0o700, exist_ok=True)
    _check(folder)
    return folder


def _check(folder: Path) -> None:
    """Raise UserError where a folder is another user's, root's excepted, its group or others may write to it, or this user may
    not read it."""
    try:
        found = folder.stat()
    except OSError:  # it is made when something is kept there, and else nothing is read
        return
    if found.st_uid not in (ROOT, os.geteuid()) and found.st_uid != _owner_of_new(folder):
        problem = f"it belongs to user {found.st_uid}, who could put anything there, and this is user {os.geteuid()}"
        raise UserError(str(folder), problem, CURE)
    if stat.S_ISDIR(found.st_mode) and not os.access(folder, os.R_OK | os.X_OK):  # root made it, in a container perhaps
        raise UserError(str(folder), f"it belongs to user {found.st_uid}, and this user may not read it", CURE)
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    if by_group or found.st_mode & stat.S_IWOTH:
        problem = f"its group or others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise UserError(str(folder), problem, f"look through it, then `chmod -R go-w {folder}`; or {CURE}")


def _is_own_group(group: int) -> bool:
    """Whether it is the group that many systems make for this user alone, whose umask is then 002."""
    with suppress(KeyError):
        user, known = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return group == user.pw_gid != ROOT and known.gr_name == user.pw_name and {*known.gr_mem} <= {user.pw_name}
    return False


def _owner_of_new(folder: Path) -> int | None:
    """Whose the files are that this process makes there: root's are nobody's on many network file systems."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return None


def once(folder: Path, is_whole: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """`folder`, built aside and moved into place unless it is there and whole. One process of the host builds, the
    others wait; what a killed one left behind is removed."""
    _check(folder.parent)
    _check(folder)
    if is_whole(folder):
        return folder
    from filelock import FileLock

    with writing(folder.parent):
        private_folder(folder.parent)
        with FileLock(f"{folder}.lock"):
            if is_whole(folder):
                return folder
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                with writing(folder.parent):  # said before what lies aside is removed: so few bytes were free
                    build(aside)
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
    known = cache_directory("digests") / name
    with suppress(OSError):
        if (text := files.read_text(known)) and holds(text):  # empty after a crash of the host
            return text
    text = find()
    with suppress(OSError):  # then it is found again
        private_folder(known.parent)
        files.write(known, text, secret=True)
    return text
