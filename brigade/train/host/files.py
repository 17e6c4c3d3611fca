"""Files where other users may write too: no link that others planted is followed, and only regular files are read.

The umask decides the mode of all that Brigade writes, except what is `secret` (logs of commands, samples of the data, answers of
the model, caches): only its owner may read that, 0600. Directories of logs and the cache (cache.py) are 0700.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...errors import UserError

CHUNK = 2**16  # bytes
MOST = 256 * 2**20  # bytes of a file that is read whole
LINE = 4096  # bytes that are read of a file which holds one line
LFS_POINTER_BYTES = 1024  # at most, by the specification of Git LFS
LFS_CURE = "fetch the file itself: git lfs pull"
# How files of rows begin that are not what their ending says: first bytes -> what it is, and the cure.
_UNPACK, _RENAME = "unpack it first", "give it the ending of what it is"
_UTF_8 = "write it in UTF-8: iconv -f UTF-16 -t UTF-8"
OTHER_FORMS = {
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"PK\x03\x04": ("a zip archive, as those of Excel are", "write its rows as CSV or JSONL"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"BZh9": ("compressed by bzip2", _UNPACK),
    b"\xfd7zXZ\x00": ("compressed by xz", _UNPACK),
    b"PAR1\x15": ("a Parquet file", f"{_RENAME}: .parquet"),
    b"ARROW1\x00": ("an Arrow file", "write it as Parquet"),
    b"SQLite format 3": ("an SQLite database", "write its rows as CSV or JSONL"),
    b"\xff\xfe\x00\x00": ("in UTF-32", _UTF_8.replace("16", "32")),
    b"\xff\xfe": ("in UTF-16", _UTF_8),
    b"\xfe\xff": ("in UTF-16", _UTF_8),
    b"<!DOCTYPE": ("a page of HTML", "download the file itself"),
    b"<html": ("a page of HTML", "download the file itself"),
}
FORM_BYTES = 64  # of a file's beginning that tell
_NEW = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def write(path: Path, content: str | bytes, secret: bool = False) -> None:
    """Write a file so that readers find it whole, or what was there before. A link there is replaced. Raises OSError."""
    with replacing(path, secret) as file:
        # Half a letter, as JSON may hold one, is shown by its number.
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, secret: bool = False) -> Iterator[IO[bytes]]:
    """Open a new file in the same directory, under a name that nobody can foresee. It takes the place of `path` at the end,
    unless there is an exception. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    file = os.fdopen(os.open(temporary, _NEW | os.O_EXCL, _mode(secret)), "wb")
    try:
        with file:
            yield file
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def create(path: Path, secret: bool = False) -> IO[str]:
    """Open a file that is not there yet, to write text. Raises OSError; FileExistsError for a link too."""
    number = os.open(path, _NEW | os.O_EXCL, _mode(secret))
    return os.fdopen(number, "w", encoding="utf-8", errors="surrogateescape")  # names of files that are not UTF-8


def append(path: Path, secret: bool = False, also_read: bool = False) -> IO[bytes]:
    """Open a regular file, made where it is missing, to append bytes without a buffer. Raises OSError, for hard links too."""
    flags = _NEW & ~os.O_WRONLY | os.O_RDWR if also_read else _NEW
    try:
        number = os.open(path, flags | os.O_APPEND | os.O_NONBLOCK, _mode(secret))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _linked(path) from None
        raise
    try:
        if not stat.S_ISCHR(os.fstat(number).st_mode):  # /dev/null, say: only root makes these
            _check_regular(number, path)
            if os.fstat(number).st_nlink > 1:  # of a file elsewhere, perhaps
                raise _linked(path)
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "ab+" if also_read else "ab", buffering=0)


def opened(path: Path) -> IO[bytes]:
    """Open a regular file to read bytes. Raises OSError; never waits, as opening a FIFO would."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(number, path)
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def read(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a regular file. Raises OSError, also where it has more than `most`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(max(size, CHUNK), most) + 1)  # Python sets aside as much as it is asked for
    if len(content) > most:
        raise OSError(errno.EOVERFLOW, f"{path.name} is larger than {most:,} bytes", str(path))
    return content


def read_text(path: Path, most: int = MOST, errors: str = "strict") -> str:
    """Return the same as text in UTF-8. Raises OSError, and UnicodeDecodeError where `errors` is strict."""
    return read(path, most).decode(errors=errors).replace("\r\n", "\n")


def odd(paths: Iterable[Path]) -> Path | None:
    """Return the first of these that is neither a file nor a directory, but a pipe, a socket or a device: whoever opens it may
    wait for ever. A link counts as what it leads to."""
    for path in paths:
        with suppress(OSError):  # a link to nowhere, or to itself: to open it fails
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return path
    return None


def make_folder(folder: Path) -> Path:
    """Return the folder, made where it is missing or where there is a link. Raises OSError."""
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(exist_ok=True)
    return folder


def remove_links(folder: Path) -> None:
    """Remove links in a folder that lead to a file, or nowhere: other programs that write there would follow them. Raises
    OSError."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and not path.is_dir():
            path.unlink()


def _mode(secret: bool) -> int:
    return 0o600 if secret else 0o666


def _check_regular(number: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(number).st_mode):
        raise OSError(errno.EINVAL, f"{path.name} is no regular file", str(path))


def _linked(path: Path) -> OSError:
    return OSError(errno.ELOOP, f"{path.name} is a link, and others may have made it", str(path))


def is_lfs_pointer(content: bytes) -> bool:
    """Whether a file that begins so is what Git keeps in the place of a large one (the specification of Git LFS)."""
    return content.startswith(b"version https://git-lfs.github.com/spec/")


def refuse_lfs_pointers(paths: Iterable[Path]) -> None:
    """Raise UserError for the first of these files that is a pointer of Git LFS."""
    for path in paths:
        if path.is_file() and path.stat().st_size <= LFS_POINTER_BYTES:
            with path.open("rb") as file:
                pointer = is_lfs_pointer(file.read(LFS_POINTER_BYTES))
            if pointer:
                raise UserError(str(path), "a pointer of Git LFS, not the file itself", LFS_CURE)


def refuse_other_forms(paths: Iterable[Path]) -> None:
    """Raise UserError for the first of these files of rows whose beginning says that it is not what its ending says."""
    for path in paths:
        with path.open("rb") as file:
            begin = file.read(FORM_BYTES)
        form = next((form for first, form in OTHER_FORMS.items() if begin.lstrip().startswith(first)), None)
        if path.suffix == ".parquet" and begin.startswith(b"PAR1"):
            continue
        if form is None and b"\0" in begin and path.suffix != ".parquet":
            form = "no text in UTF-8: it holds zero bytes, as UTF-16 does", _UTF_8
        if form:
            raise UserError(str(path), f"{form[0]}, and its name ends with {path.suffix}", form[1])


def by_umask(*paths: Path) -> None:
    """Give these files the mode that a file newly made by this process has: safetensors has written them with 0600 since 0.8.0,
    whatever the umask (it writes a temporary file and renames it), and whoever serves a model is often another account."""
    # os.umask() would have to set one to tell it, for all threads.
    umask = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if umask:
        for path in paths:
            path.chmod(0o666 & ~int(umask[1], 8))
