"""Engines run for real, as one rank of many that are only pretended: benchmarks/launching.py and benchmarks/zero3_peak.py."""

import json
import subprocess
import sys

import pytest

from benchmarks.pages import REPOSITORY
from testing import marks


def last_line(*words: str) -> str:
    """What `python -m benchmarks.WORDS` prints at last."""
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind, ranks", marks.cases(slow=[("fsdp2", 8), ("zero3", 512)], matrix=[("plain", 1)]))
def test_a_layer_is_timed_beside_ranks_that_are_not_there(kind, ranks):
    assert float(last_line("launching", "--one", json.dumps([kind, ranks, 2, True])).split()[-1]) > 0


@pytest.mark.slow
def test_zero3_allocates_about_what_the_planner_counts_at_its_peaks():
    found = json.loads(last_line("zero3_peak"))
    assert found.keys() == {"passes", "step"}
    for measured, counted in found.values():
        assert 0.97 < counted / measured < 1.08
