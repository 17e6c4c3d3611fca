"""Which of the three sizes of tests a case belongs to."""

from typing import Any

import pytest


def size(once: bool, often: bool = True) -> Any:
    """Marks of a case: none in `make test`, slow in `make test-all`, and both where `make test-matrix` alone has it."""
    return () if once else pytest.mark.slow if often else (pytest.mark.slow, pytest.mark.matrix)


def each(names: Any, seldom: set[str]) -> list[Any]:
    """Parameters of a test of clusters: all names, of which `make test-matrix` alone has those of `seldom`."""
    return [pytest.param(name, marks=[pytest.mark.matrix] * (name in seldom)) for name in names]
