"""Errors of a user's making: where, what, and how to cure it, in at most four lines."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from .console import printable

Whose = Literal["user", "host", "run", "passing"]  # errors/whose.py says what each is


@dataclass
class UserError(Exception):
    """A mistake in a recipe, a flag, a file or the machine's set-up that the user can cure.

    place: file, key, column or flag, e.g. ``recipes/tiny/full.yaml: training.learning_rate``
    problem: what is wrong there, with the value that was found
    cure: what to change
    whose: who has to act, for `launch --restarts` (whose.py); hosts: those at fault, where it is
        not only this one
    code: the exit code of a process that it ends: 1 where it ended one that had trained
    """

    place: str
    problem: str
    cure: str
    whose: Whose = "user"
    hosts: tuple[str, ...] = ()
    code: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        # Exception keeps what it was built from in args: processes and ranks that hand it on rebuild it from them.
        super().__init__(self.place, self.problem, self.cure, self.whose, self.hosts)

    def __str__(self) -> str:
        place, problem, cure = (
            " ".join(printable(str(part)).split()) for part in (self.place, self.problem, self.cure)
        )
        return f"error: {place}\n  {problem}\n  cure: {cure}"


# Of difflib: below it a name shares letters with another, and no meaning (packing_strategy, learning_rate).
LIKELY = 0.7


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that looks most like `name`, or None when nothing comes close. cutoff: difflib's, from 0 to 1"""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A cure for an unknown name: the nearest known one, or the list of all (of the first where there are many)."""
    names = sorted(known)
    best = nearest(name, names, LIKELY)
    if best:
        return f"did you mean {best!r}?"
    shown = ", ".join(names) if len(names) <= 40 else f"{', '.join(names[:40])}, ... ({len(names)} in all)"
    return f"use one of: {shown}"


def first_line(error: BaseException, most: int = 160) -> str:
    """The first line of what an exception says, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def exit_code(error: BaseException) -> int:
    """The exit code of a process that this error ends: 2 for a user's mistake as a rule, else 1."""
    return error.code if isinstance(error, UserError) else 1


def shown(value: object, form: Callable[[object], str] = repr) -> str:
    """A user's value as a message shows it: cut short, and only its type where it has no end (a YAML alias to itself)."""
    try:
        text = "null" if value is None else form(value)
    except (RecursionError, ValueError, TypeError):
        return type(value).__name__
    return shortened(text)


def shortened(text: str, most: int = 80) -> str:
    """`text`, or its first `most` characters and dots."""
    return text if len(text) <= most else f"{text[:most]} ..."
