"""What docs/evidence/local-training.md computes of replicas that meet every H steps."""

import pytest

from benchmarks import local_steps
from benchmarks.local_steps_tables import until
from brigade.train.local.local_steps import OVERLAP


def test_seconds_are_the_median_of_whole_rounds_wherever_they_begin():
    rounds = [[1, 1, 6, 1, 1], [1, 1, 1, 11, 1], [1, 1, 1, 1, 26]]  # each waits once
    block = {"seconds": [step for each in rounds for step in each], "bytes": 1.9e6}
    found = {"strategy": "DiLoCo, H = 5", "rates": ["1gbit"], "blocks": [block], "parameters": 2_361_024}
    (row,) = local_steps.timed(2, found)
    assert (row["step_seconds"], row["fastest_round"], row["slowest_round"]) == (3, 2, 6)
    assert row["kilobytes_formula"] == pytest.approx(4 * 2_361_024 / 5 / 1e3, abs=0.01)


@pytest.mark.parametrize("name", [name for name, of in local_steps.METHODS.items() if of.every > 1])
def test_rates_change_while_no_fragment_is_on_its_way(name):
    job = local_steps.timed_job(2, name)
    length = job["dropped"] + job["measured"]
    ends = [job["warm_up"] + block * length for block in range(len(job["rates"]) + 1)]
    assert all(end % OVERLAP == 0 for end in ends)
    assert job["measured"] % local_steps.METHODS[name].every == 0
    steps = int(job["flags"][job["flags"].index("--max_steps") + 1])
    assert steps >= ends[-1] + OVERLAP  # in its last steps a run sends no fragment


def test_the_first_tenth_of_powersgds_steps_is_plain():
    def rows(method):
        return [{"method": method, "step": str(step)} for step in (0, 5, 20, 100)]

    assert until(rows("DDP, PowerSGD"), 1, 10) == [0, 50, 110, 190]
    assert until(rows("DiLoCo, H = 5"), 1, 10) == [0, 5, 20, 100]
