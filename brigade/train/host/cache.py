"""The cache of derived files: each is made once per host and content, whole or not at all.

Checksums find what was damaged since, and it is made again. They do not find a stranger's work, so the cache belongs to one user:
it is made with mode 0700, and refused where it is another user's or others may write to it. One user's hosts may share it.
"""

import grp
import hashlib
import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ...errors.disk import writing
from . import files
from .checksums import MANIFEST, DamagedFile, Manifest, sealed, unsealed, write_manifest

ROOT = 0
CURE = "export BRIGADE_CACHE with a directory of your own"
SAMPLED = 8  # blocks of each file that are read when a folder is opened that was read whole before
_WHOLE = "whole"


def cache_directory(*inside: str) -> Path:
    """Return where derived files lie: $BRIGADE_CACHE or ~/.cache/brigade, or a folder in it. Raises UserError where others could
    have written what is there."""
    folder = Path(os.environ.get("BRIGADE_CACHE") or "~/.cache/brigade").expanduser()
    for part in ("", *inside):
        folder = folder / part
        _check(folder)
    return folder


def private_folder(folder: Path) -> Path:
    """Return a folder of the cache, made with mode 0700 where it is missing. Raises UserError where others could have written
    what is there, and OSError."""
    there = folder.resolve()  # behind a link to a disk that was emptied since
    missing = [part for part in (there, *there.parents) if not part.exists()]
    for part in reversed(missing):  # mkdir(parents=True) makes those between by the umask
        part.mkdir(0o700, exist_ok=True)
    _check(folder)
    return folder


def _check(folder: Path) -> None:
    """Raise UserError where a folder belongs to another user than root, where its group or others may write to it, or where this
    user may not read it."""
    try:
        status = folder.stat()
    except OSError:  # it is not there: it is made when something is kept
        return
    if status.st_uid not in (ROOT, os.geteuid()) and status.st_uid != _owner_of_new(folder):
        problem = f"it belongs to user {status.st_uid}, who could put anything there, and this is user {os.geteuid()}"
        raise UserError(str(folder), problem, CURE)
    # root made it, in a container perhaps
    if stat.S_ISDIR(status.st_mode) and not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(str(folder), f"it belongs to user {status.st_uid}, and this user may not read it", CURE)
    by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if by_group or status.st_mode & stat.S_IWOTH:
        problem = f"its group or others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
        raise UserError(str(folder), problem, f"look through it, then `chmod -R go-w {folder}`; or {CURE}")


def _is_own_group(group: int) -> bool:
    """Whether a group has only this user as a member, as many systems make it, with a umask of 002."""
    with suppress(KeyError):
        user, known = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return group == user.pw_gid != ROOT and known.gr_name == user.pw_name and {*known.gr_mem} <= {user.pw_name}
    return False


def _owner_of_new(folder: Path) -> int | None:
    """Return the owner of files that this process makes there: on many network file systems, root's belong to nobody."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
    return None


def once(folder: Path, build: Callable[[Path], None], outdated: Callable[[Path], str] = lambda folder: "") -> Path:
    """Return `folder`; unless it is there and is what was written, it is built aside and moved into place, and a line says why.
    One process of a host builds, the others wait; what a killed one left behind is removed.

    outdated: says in words why a folder that is what was written has to be built again, or ""
    """
    _check(folder.parent)
    _check(folder)

    def is_whole() -> bool:
        return not flaw(folder) and not outdated(folder)

    if is_whole():
        return folder
    from filelock import FileLock

    with writing(folder.parent):
        private_folder(folder.parent)
        with FileLock(f"{folder}.lock"):
            if is_whole():
                return folder
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            if folder.exists():
                print(f"{folder}: {flaw(folder) or outdated(folder)}: it is made anew.", file=sys.stderr)
            both = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            aside = both / "new"
            try:
                aside.mkdir(0o700)
                with writing(folder.parent):  # said before what lies aside is removed: so few bytes were free
                    build(aside)
                    write_manifest(aside, folder.name)
                with suppress(FileNotFoundError):  # whoever reads it has it open, and opens it again at the next epoch
                    folder.rename(both / "old")
                aside.rename(folder)
                remembered(_of_whole(Manifest(folder)), lambda: _WHOLE)
            finally:
                shutil.rmtree(both, ignore_errors=True)
    return folder


def flaw(folder: Path) -> str:
    """Return why a folder of the cache is not what was written, in words; "" where it is.

    A file that is by its size, inode and times the one that was written, or was read whole once, is read only in samples; another
    one (a copy, or damage) is read whole.
    """
    try:
        manifest = Manifest(folder)
        for name in manifest.bytes:
            manifest.check_size(name)
        remembered(_of_whole(manifest), lambda: _checked(manifest))
        for name in manifest.bytes:
            manifest.check_file(name, SAMPLED)
    except DamagedFile as error:
        return error.problem
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def _of_whole(manifest: Manifest) -> list[object]:
    """Return the key under which it is remembered that a folder was read whole, and is what was written."""
    return [_WHOLE, *(stamp(manifest.folder / name) for name in (MANIFEST, *manifest.bytes))]


def _checked(manifest: Manifest) -> str:
    for name in manifest.bytes:
        manifest.check_file(name)
    return _WHOLE


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, which a host computes once."""

    def of_content() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return remembered(stamp(path), of_content)


def stamp(path: Path) -> tuple[str, int, int, int, int]:
    """Return what changes when a file's content does: path, size, inode, and the time of change: the one that programs may set
    back (rsync -t), and the system's own."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def remembered(key: object, find: Callable[[], str], holds: Callable[[str], bool] = bool) -> str:
    """Return the text that find() gave for a key of this repr, earlier or, where there is none for which `holds`, now."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    known = cache_directory("digests") / name
    with suppress(OSError, ValueError):
        document = unsealed(files.read_text(known))
        if document["name"] == name and holds(document["text"]):
            return document["text"]  # type: ignore[no-any-return]
    text = find()
    with suppress(OSError):  # then it is found again
        private_folder(known.parent)
        files.write(known, sealed({"name": name, "text": text}), secret=True)
    return text
