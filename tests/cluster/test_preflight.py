"""`python -m brigade check` on real hosts: each injected fault is found, on the right host, and a sound cluster is sound."""

import re
import signal
import subprocess
import time

import pytest

from testbed.preflight import INJECTED, RECIPE, check, misses, provoke
from testing.clusters import PATIENCE, SHORT
from testing.ranks import REPOSITORY


@pytest.mark.parametrize("fault", INJECTED, ids=lambda fault: fault.name)
def test_an_injected_fault_is_found_where_it_is(cluster_of_three, fault):
    cluster_of_three.hostfile(1)
    attempt = provoke(cluster_of_three, fault)
    assert not (missed := misses(fault, attempt)), f"check does not say {missed}\n{attempt.said[-3000:]}"
    assert attempt.exit_code == (3 if fault.level == "red" else 1)


def test_a_sound_cluster_is_sound_and_rehearses(cluster_of_three):
    """The usual size: rates, network and dress rehearsal too. Nothing of it is left behind."""
    cluster_of_three.hostfile(1)
    before = sorted(path.name for path in cluster_of_three.shared.iterdir())
    attempt = check(cluster_of_three, "usual")
    levels = {level for levels in attempt.levels().values() for level in levels}
    assert levels <= {"green", "grey"}, attempt.said
    assert attempt.exit_code == 0
    assert attempt.levels("dress rehearsal") == {host.name: ["green"] for host in cluster_of_three}
    assert sorted(path.name for path in cluster_of_three.shared.iterdir()) == before


def test_stopped_in_the_rehearsal_it_leaves_nothing(cluster_of_three):
    """Ctrl-C while ranks train on three hosts: the fixture sees that no process is left."""
    cluster = cluster_of_three
    before = sorted(path.name for path in cluster.shared.iterdir())
    words = ["python", "-m", "brigade", "check", RECIPE, "--hostfile", str(cluster.hostfile(1)), "--json", "-"]
    words += ["--output_dir", f"{cluster.shared}/stopped"]
    process = cluster["node1"].popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while not all(host.find("train.py --recipe") for host in cluster):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster["node1"].send(process, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, said
    assert "stopped by SIGINT" in said
    assert sorted(path.name for path in cluster.shared.iterdir()) == sorted({*before, "hostfile"})


def test_a_rehearsal_that_fails_names_the_host(cluster_of_three):
    """A fault that only a run meets: a training process is killed in its forward pass."""
    cluster = cluster_of_three
    cluster.hostfile(1)
    for host in cluster:  # rank 1's own process finds that it is meant
        host.environment(BRIGADE_TEST_FAULT="killed-in-forward", PYTHONPATH=str(REPOSITORY / "tests/ranks/bad_input"))
    try:
        attempt = check(cluster, "usual")
    finally:
        for host in cluster:
            host.environment()
    assert attempt.exit_code == 3
    levels = attempt.levels("dress rehearsal")
    assert levels == {"node1": ["grey"], "node2": ["red"], "node3": ["grey"]}, attempt.said
    assert "killed by signal 9" in attempt.said


def launched(cluster, name, words=""):
    words = f"--output_dir {cluster.shared}/{name} --log_dir {cluster.shared}/{name}-logs {' '.join(SHORT)} {words}"
    command = f"python -m brigade launch {RECIPE} --hostfile {cluster.hostfile(1)} {words}"
    return cluster["node1"].run(command.replace("SHARED", str(cluster.shared)), timeout=PATIENCE, check=False)


def test_launch_refuses_hosts_with_which_no_run_can_begin_unless_it_is_told_to(cluster_of_three):
    """A file to train on that one host lacks: the quick checks find it before any rank has begun."""
    cluster, fault = cluster_of_three, next(fault for fault in INJECTED if fault.name == "missing-data")
    fault.arrange(cluster)
    try:
        refused = launched(cluster, "refused", fault.words)
        assert refused.returncode == 2
        assert re.search(rf"error: {fault.host}\n.*{fault.says}", refused.stderr), refused.stderr
        assert not (cluster.shared / "refused").exists()
        begun = launched(cluster, "begun", f"{fault.words} --no_check")
        assert begun.returncode == 2
        assert "waiting for" not in begun.stderr
        assert "starting 1 rank" in begun.stderr, begun.stderr  # train.py finds it
    finally:
        fault.heal(cluster)


def test_launch_tells_of_other_faults_and_goes_on(cluster_of_three):
    cluster, fault = cluster_of_three, next(fault for fault in INJECTED if fault.name == "clock")
    fault.arrange(cluster)
    try:
        done = launched(cluster, "told")
        assert done.returncode == 0, done.stderr
        assert re.search(rf"FAIL clock, {fault.host}: {fault.says}", done.stderr), done.stderr
    finally:
        fault.heal(cluster)
