"""What `launch --elastic` refuses, and what the replicas of a run that it starts know of each other."""

import json
import subprocess
import sys

import pytest

from brigade.launch.elastic import without_output
from brigade.train.cluster import ELASTIC, world_from_environment

RECIPE = "recipes/tiny/full.yaml"
GOOD = ["--sync_every", "5"]
REFUSED = {
    "no synchronisation": ([], "node1 slots=1\nnode2 slots=1\n", ["flag --elastic", "sync_every", "--restarts"]),
    "one host": ([*GOOD, "--sync_replica", "rank"], "node1 slots=2\n", ["flag --elastic", "only one host"]),
    "fresh": ([*GOOD, "--fresh"], "node1 slots=1\nnode2 slots=1\n", ["flag --fresh", "--output_dir"]),
    "quantised states": (
        [*GOOD, "--optim", "adamw_8bit"],
        "node1 slots=1\nnode2 slots=1\n",
        ["flag --optim", "adamw_8bit", "adamw_torch"],
    ),
    "spares": ([*GOOD, "--spare", "node3"], "node1 slots=1\nnode2 slots=1\n", ["flag --spare", "leave it out"]),
    "a job file": ([*GOOD, "--write", "sbatch"], "node1 slots=1\nnode2 slots=1\n", ["flag --write", "leave it out"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_elastic_is_refused_with_a_cure(name, tmp_path):
    flags, hosts, words = REFUSED[name]
    (tmp_path / "hostfile").write_text(hosts)
    command = [sys.executable, "-m", "brigade", "launch", RECIPE, "--hostfile", str(tmp_path / "hostfile"), "--elastic"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "cure: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not [word for word in words if word not in done.stderr], done.stderr


def test_each_replica_is_a_world_of_its_own_and_writes_for_itself():
    told = {"replica": 2, "replicas": 4}
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", ELASTIC: json.dumps(told)}
    world = world_from_environment(ranks)
    assert (world.size, world.replica, world.of_all_replicas, world.number) == (2, 2, 8, 4)
    assert world.is_main_rank and world.part(4).replica == 0


def test_a_run_keeps_its_one_output_directory_from_its_replicas():
    words = ["--max_steps", "3", "--output_dir", "here", "--seed", "1", "--output_dir=there"]
    assert list(without_output(words)) == ["--max_steps", "3", "--seed", "1"]


@pytest.mark.parametrize(
    ("asked", "all_stop"),
    [
        ([("", 0), ("SIGTERM to rank 0", 15), ("", 0)], False),
        ([("SIGTERM to rank 0", 15), ("SIGTERM to rank 0", 15), ("", 0)], True),
        ([("the file stop", 0), ("", 0), ("", 0)], True),
        ([("", 0), ("", 0), ("Ctrl-C", 2)], True),
        ([("SIGTERM to rank 0", 15), ("", 0)], False),
    ],
)
def test_a_stop_of_one_replica_by_its_own_launch_is_not_the_others(asked, all_stop):
    """A launch whose torchrun was killed ends its rank by SIGTERM; three such ends once stopped a whole run."""
    from brigade.train.loop.elastic_steps import ElasticSteps

    said = [({"should_training_stop"} if by else set(), by, number, 0) for by, number in asked]
    judge = ElasticSteps.__new__(ElasticSteps)
    assert all(judge._is_for_all(by, number, said) for _, by, number, _ in said if by) == all_stop
    assert judge._is_for_all("", 0, said)
