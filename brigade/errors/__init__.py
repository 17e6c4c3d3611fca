"""Errors of a user's making: where, what, and how to cure it, in at most four lines."""

import difflib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class UserError(Exception):
    """A mistake in a recipe, a flag, a file or the machine's set-up that the user can cure.

    place: file, key, column or flag, e.g. ``recipes/tiny/full.yaml: training.learning_rate``
    problem: what is wrong there, with the value that was found
    cure: what to change
    """

    place: str
    problem: str
    cure: str

    def __post_init__(self) -> None:
        # Exception keeps what it was built from in args; pickling between ranks rebuilds the error from them.
        super().__init__(self.place, self.problem, self.cure)

    def __str__(self) -> str:
        place, problem, cure = (" ".join(str(part).split()) for part in (self.place, self.problem, self.cure))
        return f"error: {place}\n  {problem}\n  cure: {cure}"


def of_disk(error: BaseException, directory: Path | None = None) -> UserError | None:
    """A disk that is full, may not be written or has no home directory, as a user's error; None for any other error.

    directory: where was written, for errors that name no file
    """
    for failure, _ in getattr(error, "failures", {}).values():  # torch's CheckpointException: what each rank met
        if known := of_disk(failure, directory):
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
    )


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """What fails here because of a disk names this directory."""
    try:
        yield
    except Exception as error:
        if known := of_disk(error, directory):
            raise known from None
        raise


_RIGHTS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_OF_DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and start again"),
    errno.EIO: "see that the disk is sound and has room",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys(_RIGHTS, "make it writable"),
}
# torch's writer only finds itself elsewhere in its file than it should be, numpy's that less was written than asked for
_WITHOUT_A_REASON = ("inline_container.cc", "PytorchStreamWriter", "iostream error", "requested and")


def _free(path: Path) -> int:
    """Bytes that are free where it is, or would be."""
    there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    return shutil.disk_usage(there).free


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None when nothing comes close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A cure for an unknown name: the nearest known one, or the list of all (of the first where there are many)."""
    names = sorted(known)
    best = nearest(name, names)
    if best:
        return f"did you mean {best!r}?"
    shown = ", ".join(names) if len(names) <= 40 else f"{', '.join(names[:40])}, ... ({len(names)} in all)"
    return f"use one of: {shown}"


def first_line(error: BaseException, most: int = 160) -> str:
    """The first line of what an exception says, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def exit_code(error: BaseException) -> int:
    """Of a process that ends by it: 2 for a user's mistake, else 1."""
    return 2 if isinstance(error, UserError) else 1
