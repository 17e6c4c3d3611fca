"""Ranks wait for one that prepares, end with one that dies meanwhile, and see when one no longer holds what they hold."""

import os
import socket
import subprocess
import sys

import pytest

from brigade.train.distributed import ranks
from testing import agreeing, diverging
from testing.command_line import run_here
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
    # Whoever waits for the dead rank does so for the process group's time-out, which is longer.
    done = run_here([*torchrun, "-m", "testing.agreeing", "dies"], 200, DIES=str(dies), PYTHONPATH=str(REPOSITORY))
    assert done.returncode == 1
    # The other one sees by itself that rank 0 is gone, unless its launcher ends it first.
    seen = {"rank 1 on " + socket.gethostname() + " stops because another rank failed first (rank 0 has ended)"}
    assert {*ranks_part(done.stderr)} <= (seen if dies == 0 else set()), done.stderr
    root = done.stderr.partition("Root Cause")[2]
    assert f"rank      : {dies} " in root and "Signal 9 (SIGKILL)" in root, done.stderr


def by_hand(case, places, **variables):
    """Two ranks of a case of testing/agreeing.py with these LOCAL_RANKs, no launcher: the code and the stderr of each."""
    variables |= {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", agreeing.__name__, case],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(place)},
        )
        for rank, place in enumerate(places)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [*zip((process.returncode for process in processes), said, strict=True)]


def test_the_others_say_one_line_when_the_rank_that_keeps_the_addresses_dies():
    """Under deepspeed that is rank 0, and its launcher comes a second later."""
    (code, first), (other_code, second) = by_hand("dies", (0, 1), LOCAL_WORLD_SIZE="2", DIES="0")
    assert not first and code == -9
    (line,) = second.splitlines()
    assert line.startswith(f"rank 1 on {socket.gethostname()} stops because another rank failed first (")
    assert other_code == 1


def test_ranks_that_are_not_where_they_are_said_to_be_are_told_once():
    """As one task for each GPU, each told that it is alone on its host."""
    (code, first), (other_code, second) = by_hand("dies", (0, 0), LOCAL_WORLD_SIZE="1", DIES="0")
    assert code == other_code == 2 and not second
    assert "2 of 2 ranks are here, with LOCAL_RANK 0, 0, and LOCAL_WORLD_SIZE is 1" in first


@pytest.fixture(scope="module")
def gone_astray(tmp_path_factory):
    """call(cases, ranks): what each run said and saved whose rank goes astray after a step."""
    return lambda cases, size: diverging.run_group(tmp_path_factory.mktemp("astray"), cases, size)


@pytest.mark.slow
def test_a_rank_that_goes_astray_is_named_at_the_next_checkpoint_and_not_saved(gone_astray):
    """It trained on to its end before, with whole checkpoints. ZeRO gathers weights anew in each step, from its master copies."""
    cases = {
        "ddp: weights": ("ddp", "weights", 1, 3, "model.embed_tokens.weight"),
        "ddp: a moment": ("ddp", "moment", 0, 3, "model.embed_tokens.weight"),
        "ddp: the last moment": ("ddp", "moment", 0, 4, "exp_avg of model.embed_tokens.weight"),
        "ddp: a count": ("ddp", "count", 1, 3, "the optimizer's count of steps (5.0 on rank 1, 4.0 on rank 0)"),
        "ddp: a rate": ("ddp", "rate", 1, 4, "the learning rate"),
        "ddp: data": ("ddp", "epoch", 1, 4, "the place in the data"),
        "ddp: nothing": ("ddp", "nothing", 1, 4, ""),
        "lora: a bit of the base": ("ddp+lora", "bit", 1, 3, "base_model.model.model.norm.weight"),
        "zero1: weights": ("zero1", "weights", 1, 4, "model.embed_tokens.weight"),
        "zero2: weights": ("zero2", "weights", 1, 4, "model.embed_tokens.weight"),
        "zero3: weights": ("zero3", "weights", 1, 4, "model.layers.0.input_layernorm.weight"),
        "pipeline: the tied end": ("pipeline", "weights", 1, 3, "model.embed_tokens.weight"),
        "autotp: nothing": ("autotp", "nothing", 1, 4, ""),
        "autotp: norms": ("autotp", "norms", 1, 4, "model.layers.0.input_layernorm.weight"),
    }
    found = gone_astray({name: case[:4] for name, case in cases.items()}, 2)
    for name, (*_, first) in cases.items():
        said = found[name]
        if not first:
            assert said == {"checkpoints": [2, 4]}, name
            continue
        host = socket.gethostname()
        assert f"rank 0 on {host} and rank 1 on {host} no longer hold the same" in said["said"], name
        assert f"first {first}" in said["said"] and "checkpoint-2 is the newest sound one" in said["said"], said["said"]
        assert said["checkpoints"] == [2] and said["code"] == 1, name


@pytest.mark.slow
def test_of_several_ranks_the_odd_one_is_named_among_those_that_hold_the_same(gone_astray):
    cases = {
        "ddp": ("ddp", "bit", 2, 3),
        "hsdp": ("hsdp", "weights", 3, 3),
        "hsdp: nothing": ("hsdp", "nothing", 3, 3),
        "tensor": ("tensor", "norms", 2, 3),
        "tensor: nothing": ("tensor", "nothing", 2, 3),
    }
    found, host = gone_astray(cases, 4), socket.gethostname()
    assert f"rank 2 on {host} holds something else than most of 4 ranks" in found["ddp"]["said"]
    assert (found["ddp"]["whose"], found["ddp"]["hosts"]) == ("host", [host]), "launch leaves it out where it may"
    assert f"rank 1 on {host} and rank 3 on {host} no longer hold the same" in found["hsdp"]["said"]
    assert f"rank 2 on {host} and rank 3 on {host} no longer hold the same" in found["tensor"]["said"]
    assert found["hsdp: nothing"] == found["tensor: nothing"] == {"checkpoints": [2, 4]}
