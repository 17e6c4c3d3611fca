"""benchmarks/launching.py: engines run for real, as one rank of many that are only pretended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind, ranks", [("plain", 1), ("fsdp2", 8), ("zero3", 512)])
def test_a_layer_is_timed_beside_ranks_that_are_not_there(kind, ranks):
    command = [sys.executable, "-m", "benchmarks.launching", "--one", json.dumps([kind, ranks, 2, True])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) > 0
