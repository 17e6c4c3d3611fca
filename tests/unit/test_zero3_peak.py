"""What DeepSpeed's ZeRO-3 allocates at its peaks, beside the planner's count."""

import json
import subprocess
import sys

import pytest

from benchmarks.pages import REPOSITORY


@pytest.mark.slow
def test_zero3_allocates_about_what_is_counted():
    command = [sys.executable, "-m", "benchmarks.zero3_peak"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"passes", "step"}
    for measured, counted in found.values():
        assert 0.97 < counted / measured < 1.08
