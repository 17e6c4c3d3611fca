"""Several runs: what differs between their recipes, and whether their losses differ by more than chance explains."""

from dataclasses import dataclass, field
from typing import Any

from .reading import Record


@dataclass
class Comparison:
    different: tuple[list[str], list[list[Any]]] = field(default_factory=lambda: ([], []))
    verdicts: list[str] = field(default_factory=list)
    overview: tuple[list[str], list[list[Any]]] = field(default_factory=lambda: ([], []))


def compare(records: list[Record]) -> Comparison:
    return Comparison()
