"""The three tiers of cases: without a mark in `make test`, slow in `make test-all`, matrix in `make test-matrix`."""

from collections.abc import Iterable
from typing import Any

import pytest


def cases(*quick: Any, slow: Iterable[Any] = (), matrix: Iterable[Any] = ()) -> list[Any]:
    """Return the parameters of a test, each with the mark of its tier; a tuple holds the values of several arguments.

    matrix: all other cases; those that stand in another tier too, as in a whole table, are left out
    """
    slow = list(slow)
    tiers: list[tuple[list[Any], pytest.MarkDecorator | tuple[()]]] = [
        (list(quick), ()),
        (slow, pytest.mark.slow),
        ([case for case in matrix if case not in [*quick, *slow]], pytest.mark.matrix),
    ]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark, id=_id(case))
        for tier, mark in tiers
        for case in tier
    ]


def named(quick: Iterable[Any], slow: Iterable[Any], matrix: Iterable[Any]) -> list[Any]:
    """Return what cases() does, of the names of cases; of a name that stands in two tiers the first counts."""
    of_quick, of_slow, of_all = (dict.fromkeys(map(str, tier)) for tier in (quick, slow, matrix))
    return cases(*of_quick, slow=[name for name in of_slow if name not in of_quick], matrix=of_all)


def _id(case: Any) -> str | None:
    return None if isinstance(case, tuple) else str(case)
