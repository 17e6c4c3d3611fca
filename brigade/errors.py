"""Errors of a user's making: where, what, and how to cure it, in at most four lines."""

import difflib
import errno
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


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
        one_line = (" ".join(str(part).split()) for part in (self.place, self.problem, self.cure))
        place, problem, cure = one_line
        return f"error: {place}\n  {problem}\n  cure: {cure}"


def numeric(flag: str, least: float, kind: type = int, below: float = math.inf) -> Callable[[str], Any]:
    """A type for argparse: numbers from `least` on and smaller than `below`. It raises UserError for all others, NaN too."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(text)) < below:
                return value
        wanted = f"a {'whole ' if kind is int else ''}number from {least}" + f" and below {below:g}" * (
            below < math.inf
        )
        raise UserError(f"flag --{flag}", f"{text!r} is not {wanted}", f"give {wanted}, or leave the flag out")

    return read


def of_disk(error: BaseException) -> UserError | None:
    """A disk that is full or may not be written, as a user's error; None for any other error.

    Where safetensors writes, the system's words are all that is left of the error's number.
    """
    path, words = getattr(error, "filename", None), str(error)
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
    code = next((c for c in codes if getattr(error, "errno", None) == c or os.strerror(c) in words), None)
    if code is None or not (isinstance(error, OSError) or "I/O error" in words):
        return None
    cure = "free some space" if code in codes[:2] else "make it writable"
    return UserError(
        str(path or "a file of this run"),
        f"it cannot be written or read: {os.strerror(code)}",
        f"{cure}, or use "
        "another disk: --output_dir for the run, BRIGADE_CACHE, HF_HOME and TORCH_EXTENSIONS_DIR for caches",
    )


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
