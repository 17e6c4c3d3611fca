"""Checkpoints are of the size that the planner counts (benchmarks/hosts.py)."""

import pytest

from benchmarks import planner_hosts


def test_checkpoints_are_of_the_size_that_the_formula_says():
    """Those of full runs agree within a hundredth."""
    full = [one for one in planner_hosts.checkpoints() if ", full" in one.what]
    assert len(full) >= 9 and all(one.measured == pytest.approx(one.predicted, rel=0.01) for one in full)
