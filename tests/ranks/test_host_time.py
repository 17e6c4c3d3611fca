"""A GPU waits for Python: a run calls no more functions for a step than a plain loop does. Calls are the same on any machine."""

import pytest

from benchmarks import host_time
from benchmarks.host_time_worker import ACCUMULATION
from testing.marks import cases

MOST = 1.05  # times the plain loop's


@pytest.mark.parametrize("strategy", cases("one process", slow=["ZeRO-3"], matrix=["DDP"]))
def test_a_step_calls_no_more_functions_than_a_plain_loop(strategy):
    found = host_time.measure(strategy, ["plain", "ours"], count=True)
    # Under ZeRO-3 a weight that is gathered twice would be seen here: it is the half of all calls.
    plain, ours = found["plain"], found["ours"]
    assert ACCUMULATION * plain["micro"] + plain["step"] > 20_000  # the forward passes are counted
    assert all(ours[part] <= MOST * plain[part] for part in ("micro", "step")), found
