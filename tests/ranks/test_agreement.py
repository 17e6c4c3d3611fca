"""Ranks wait for one that prepares, however long it takes, and end with one that dies meanwhile."""

import os
import socket
import subprocess
import sys

import pytest

from brigade.train.distributed import ranks
from testing import agreeing
from testing.ranks import REPOSITORY, run_ranks
from testing.train_command import ranks_part


@pytest.mark.slow
def test_one_rank_may_prepare_for_longer_than_a_collective_waits():
    done = run_ranks("testing.agreeing", "slow", ranks=2, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} went on after [0, 1]" in done.stdout for rank in (0, 1))
    assert "rank 1 gave up" in done.stdout, "a time-out that does not come proves nothing"


def test_ranks_that_end_with_a_mistake_and_are_ended_by_their_launcher_say_no_more_than_the_mistake():
    done = run_ranks("testing.agreeing", "mistaken", ranks=2, timeout=60)
    assert done.returncode != 0
    assert done.stderr.splitlines() == [
        f"error on {socket.gethostname()}, rank 0 of 2: flag --this",
        "  it is wrong",
        "  cure: say another",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_meanwhile_ends_the_others(dies):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"DIES": str(dies), "PYTHONPATH": str(REPOSITORY)}
    command = [*torchrun, "-m", "testing.agreeing", "dies"]
    # Whoever waits for the dead rank does so for the process group's time-out, which is longer.
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    # The other one sees by itself that rank 0 is gone, unless its launcher ends it first.
    seen = {"rank 1 on " + socket.gethostname() + " stops because another rank failed first (rank 0 has ended)"}
    assert {*ranks_part(done.stderr)} <= (seen if dies == 0 else set()), done.stderr
    root = done.stderr.partition("Root Cause")[2]
    assert f"rank      : {dies} " in root and "Signal 9 (SIGKILL)" in root, done.stderr


def test_the_others_say_one_line_when_the_rank_that_keeps_the_addresses_dies():
    """Under deepspeed that is rank 0, and its launcher comes a second later."""
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "DIES": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", agreeing.__name__, "dies"],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        first, second = (process.communicate(timeout=60)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert not first and processes[0].returncode == -9
    (line,) = second.splitlines()
    assert line.startswith(f"rank 1 on {socket.gethostname()} stops because another rank failed first (")
    assert processes[1].returncode == 1
