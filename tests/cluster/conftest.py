"""Real hosts for the tests: one cluster per worker of pytest. They need root; `make test-cluster` says what is missing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.cluster import Cluster
from testbed.needs import missing

REPOSITORY = Path(__file__).resolve().parents[2]
# Enough to see losses part, and short: importing the libraries takes longer than these steps. No answers: sixteen ranks on
# two cores write three of them for a minute.
STEPS = 4
SHORT = ["--max_steps", str(STEPS), "--logging_steps", "1", "--max_train_samples", "100", "--max_eval_samples", "10"]
SHORT += ["--eval_answers", "0"]
PATIENCE = 900  # seconds that a run may take on a busy machine: a limit against hangs, not a measure


def pytest_sessionstart(session):
    """Without root or a program nothing here can run: say so once, and fail."""
    if lacks := missing():
        pytest.exit("\n  ".join(["these tests build real hosts, which this machine cannot:", *lacks]), returncode=2)


@pytest.fixture(scope="session")
def session_cluster():
    """Two hosts of which the second has a bare remote shell."""
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def session_cluster_of_three():
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster):
    """The session's cluster, in good health before the test, and checked afterwards: no process may be left on any host."""
    yield from _in_good_health(session_cluster)


@pytest.fixture
def cluster_of_three(session_cluster_of_three):
    """As `cluster`, with a third host, for a spare."""
    yield from _in_good_health(session_cluster_of_three)


def _in_good_health(cluster):
    cluster.heal()
    yield cluster
    deadline = time.monotonic() + 3  # sshd's own children need a moment after their client is gone
    while left := {host.name: list(host.processes().values()) for host in cluster if host.processes()}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    cluster.heal()
    assert not left, f"processes were left behind: {left}"


def losses(output: Path) -> list[float]:
    """What a run logged."""
    state = json.loads((output / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def train_alone(flags: list[str], output: Path) -> list[float]:
    """Losses of the tiny recipe on one process of this machine."""
    command = [sys.executable, "train.py", *flags, "--output_dir", str(output)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(output)


@pytest.fixture(scope="session")
def single(tmp_path_factory) -> list[float]:
    """What every run must log that is started with the flags in SHORT."""
    return train_alone(SHORT, tmp_path_factory.mktemp("single") / "run")
