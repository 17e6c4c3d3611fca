"""Turn a disk's errors into a user's: it is full, may not be written, or there is no home directory."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import UserError
from .whose import of_errno


def of_disk(error: BaseException, directory: Path | None = None) -> UserError | None:
    """A full disk, one that may not be written, or a missing home directory as a user's error; None for any other error.

    directory: where the program was writing, for errors that name no file
    """
    for failure, _ in getattr(error, "failures", {}).values():  # torch's CheckpointException: what each rank met
        known = of_disk(failure, directory)
        if known:
            return known
    words, path = str(error), getattr(error, "filename", None) or directory
    if isinstance(error, RuntimeError) and "home directory" in words:  # pathlib's, of a user unknown to the system
        problem = f"it is not set, and user {os.getuid()} has no home directory"
        cure = "export HOME, or BRIGADE_CACHE and TORCH_EXTENSIONS_DIR, with a directory to keep caches in"
        return UserError("environment variable HOME", problem, cure)
    of_rust = re.search(r"\(os error (\d+)\)", words)  # safetensors and tokenizers raise classes of their own
    code = int(of_rust[1]) if of_rust else getattr(error, "errno", None)
    if isinstance(error, RuntimeError | OSError) and any(part in words for part in _WITHOUT_A_REASON):
        code = errno.EIO if directory and _free(directory) > 2**20 else errno.ENOSPC
    if code not in _OF_DISK:
        return None
    free = f"; {_free(Path(path)):,} bytes are free there" if path and code not in _RIGHTS else ""
    return UserError(
        str(path or "a file of this run"),
        f"it cannot be written or read: {os.strerror(code)}{free}",
        f"{_OF_DISK[code]}, or use "
        "another disk: --output_dir for the run, BRIGADE_CACHE, HF_HOME and TORCH_EXTENSIONS_DIR for caches",
        of_errno(code),
    )


def exists(path: Path) -> bool:
    """Whether the path exists; False also where the file system does not answer and Path.exists() raises."""
    try:
        return path.exists()
    except OSError:
        return False


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn what fails inside because of a disk into a UserError; one without a file of its own names this directory."""
    try:
        yield
    except Exception as error:
        known = of_disk(error, directory)
        if known:
            raise known from None
        raise


_RIGHTS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_OF_DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and start again"),
    errno.EIO: "see that the disk is sound and has room",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys(_RIGHTS, "make it writable"),
}
# torch's writer only notices a wrong position in its file, numpy's that fewer bytes were written than it asked for
_WITHOUT_A_REASON = ("inline_container.cc", "PytorchStreamWriter", "iostream error", "requested and")


def _free(path: Path) -> int:
    """Free bytes of the disk where the path is, or would be."""
    there = next((folder for folder in (path, *path.absolute().parents) if exists(folder)), Path("/"))
    return shutil.disk_usage(there).free
