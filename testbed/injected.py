"""A fault of a cluster that `python -m brigade check` has to find before a run does."""

from collections.abc import Callable
from dataclasses import dataclass

from .cluster import Cluster


@dataclass(frozen=True)
class Injected:
    """arrange, heal: bring the fault about on a cluster in good health, and undo it

    host: the one at fault; check: the row that finds it; says: a regular expression in its problem; level: how grave it is
    size: of `check`, from which on it is found
    words: further ones of the command line; SHARED stands for the directory that all hosts share
    """

    name: str
    about: str
    arrange: Callable[[Cluster], None]
    host: str
    check: str
    says: str
    heal: Callable[[Cluster], None]
    level: str = "red"
    size: str = "quick"
    words: str = ""
