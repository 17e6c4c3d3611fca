"""Real hosts for the tests: one cluster per worker of pytest. They need root; `make test-cluster` says what is missing."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from testbed.cluster import Cluster
from testbed.needs import missing
from testing.clusters import SHORT, train_alone
from testing.ranks import FOLDER
from testing.run_files import losses_of


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


@pytest.fixture(scope="session")
def single() -> list[float]:
    """What every run must log that is started with the flags in SHORT: of one run, for all workers of pytest."""
    shared = Path(os.environ[FOLDER])
    with (shared / "single.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "single" / "success.json").exists():
            train_alone(SHORT, shared / "single")
    return losses_of(shared / "single")
