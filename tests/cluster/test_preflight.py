"""`python -m brigade check` on real hosts: each injected fault is found, on the right host, and a sound cluster is sound."""

import re
import signal
import subprocess

import pytest

from testbed import check_same
from testbed.check_network import even
from testbed.cluster import PROJECT
from testbed.preflight import INJECTED, RECIPE, check, misses, provoke
from testing import marks
from testing.clusters import SHORT, launch_words
from testing.patience import PATIENCE, wait_until
from testing.ranks import REPOSITORY

# Faults of one host that do not hide each other: one check of a host that has them all has to find each.
TOGETHER = [
    "own-name-is-loopback small-mtu other-accelerate other-tqdm changed-file few-open-files tiny-shm clock disk-nearly-full",
    "name-is-loopback lost-packets other-variable prints-our-lines",
    "name-is-unknown other-python other-commit small-files",
    "not-shared missing-data",
]
# A host whose link is cut answers as little as one that is off; logins, names, datagrams and temporary files have unit tests.
MATRIX = ["powered-off", "exec-bash", "long-packets-lost", "names-a-user", "lossy-way", "no-tmp"]
BY_NAME = {fault.name: fault for fault in INJECTED}
ONE_BY_ONE = [name for name in BY_NAME if name not in " ".join(TOGETHER).split()]


@pytest.mark.parametrize(
    "names", marks.cases(*TOGETHER, *(name for name in ONE_BY_ONE if name not in MATRIX), matrix=MATRIX)
)
def test_an_injected_fault_is_found_where_it_is(cluster_of_three, names):
    cluster_of_three.hostfile(1)
    faults = [BY_NAME[name] for name in names.split()]
    attempt = provoke(cluster_of_three, *faults)
    missed = [what for fault in faults if (what := misses(fault, attempt))]
    assert not missed, f"check does not say {missed}\n{attempt.said[-3000:]}"
    assert attempt.exit_code == (3 if any(fault.level == "red" for fault in faults) else 1)


def test_a_sound_cluster_is_sound_and_rehearses(cluster_of_three):
    """The usual size: rates, a network of known rates and the dress rehearsal too. Nothing of it is left behind."""
    cluster_of_three.hostfile(1)
    even(cluster_of_three)
    before = sorted(path.name for path in cluster_of_three.shared.iterdir())
    attempt = check(cluster_of_three, "usual")
    levels = {level for levels in attempt.levels().values() for level in levels}
    assert levels <= {"green", "grey"}, attempt.said
    assert attempt.exit_code == 0
    for name in ("dress rehearsal", "collectives"):
        assert attempt.levels(name) == {host.name: ["green"] for host in cluster_of_three}
    pairs = next(row["results"] for row in attempt.found["checks"] if row["name"] == "pairs")
    assert len(pairs) == 3 and all(0.3 < one["amount"] < 0.55 for one in pairs)  # Gbit/s, of 0.5
    assert sorted(path.name for path in cluster_of_three.shared.iterdir()) == before


def test_stopped_in_the_rehearsal_it_leaves_nothing(cluster_of_three):
    """Ctrl-C while ranks train on three hosts: the fixture sees that no process is left."""
    cluster = cluster_of_three
    before = sorted(path.name for path in cluster.shared.iterdir())
    words = ["python", "-m", "brigade", "check", RECIPE, "--hostfile", str(cluster.hostfile(1)), "--json", "-"]
    words += ["--only", "dress rehearsal", "--output_dir", f"{cluster.shared}/stopped"]
    process = cluster["node1"].popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all(host.find("train.py --recipe") for host in cluster), process)
    cluster["node1"].send(process, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, said
    assert "stopped by SIGINT" in said
    assert sorted(path.name for path in cluster.shared.iterdir()) == sorted({*before, "hostfile"})


@pytest.mark.matrix  # two minutes beside other clusters
def test_a_rehearsal_that_fails_names_the_host(cluster_of_three):
    """A fault that only a run meets: a training process is killed in its forward pass."""
    cluster = cluster_of_three
    cluster.hostfile(1)
    for host in cluster:  # rank 1's own process finds that it is meant
        host.environment(BRIGADE_TEST_FAULT="killed-in-forward", PYTHONPATH=str(REPOSITORY / "tests/ranks/bad_input"))
    try:
        attempt = check(cluster, "usual", '--only "dress rehearsal"')
    finally:
        for host in cluster:
            host.environment()
    assert attempt.exit_code == 3
    levels = attempt.levels("dress rehearsal")
    assert levels == {"node1": ["grey"], "node2": ["red"], "node3": ["grey"]}, attempt.said
    assert "killed by signal 9" in attempt.said


def launched(cluster, name, words="", hosts=3):
    hostfile = cluster.hostfile({host.name: 1 for host in cluster.hosts[:hosts]})
    further = words.replace("SHARED", str(cluster.shared)).split()
    command = launch_words(hostfile, cluster.shared / name, *SHORT, *further)
    return cluster["node1"].run(command, timeout=PATIENCE, check=False)


def test_launch_refuses_hosts_with_which_no_run_can_begin_unless_it_is_told_to(cluster_of_three):
    """A file to train on that one host lacks: the quick checks find it before any rank has begun."""
    cluster, fault = cluster_of_three, BY_NAME["missing-data"]
    fault.arrange(cluster)
    try:
        refused = launched(cluster, "refused", fault.words)
        assert refused.returncode == 2
        assert re.search(rf"error: {fault.host}\n.*{fault.says}", refused.stderr), refused.stderr
        assert not (cluster.shared / "refused" / "run").exists()
        begun = launched(cluster, "begun", f"{fault.words} --no_check")
        assert begun.returncode == 2
        assert "waiting for" not in begun.stderr
        assert "starting 1 rank" in begun.stderr, begun.stderr  # train.py finds it
    finally:
        fault.heal(cluster)


@pytest.mark.matrix  # two minutes beside other clusters
def test_launch_tells_of_other_faults_and_goes_on(cluster_of_three):
    cluster, fault = cluster_of_three, BY_NAME["clock"]
    fault.arrange(cluster)
    try:
        done = launched(cluster, "told", hosts=2)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"FAIL clock, {fault.host}: {fault.says}", done.stderr), done.stderr
    finally:
        fault.heal(cluster)


# ---- hosts that differ -----------------------------------------------------------------------------------------------
def commit_of(host):
    return host.run(f"git -C {PROJECT} rev-parse HEAD").stdout.strip()


def test_another_commit_is_checked_out_after_a_yes_and_never_over_a_changed_file(cluster_of_three):
    cluster = cluster_of_three
    cluster.hostfile(1)
    clean = not subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=PROJECT).returncode
    check_same.other_commit(cluster)
    try:
        odd, wanted = cluster["node2"], commit_of(cluster["node1"])
        other = commit_of(odd)
        assert other != wanted
        asked = check(cluster, words="--only code --fix")
        assert commit_of(odd) == other  # nothing ran
        assert (f"checkout --quiet --detach {wanted}" in asked.said) == clean
        odd.run(f"echo '# mine' >> {PROJECT}/train.py")
        refused = check(cluster, words="--only code --fix --yes")
        assert commit_of(odd) == other
        assert refused.exit_code == 3
        odd.run(f"git -C {PROJECT} checkout --quiet train.py")
        done = check(cluster, words="--only code --fix --yes")
        if clean:  # else no checkout makes the hosts equal, and none is tried
            assert commit_of(odd) == wanted, done.said
            assert done.exit_code == 0, done.said
            assert done.levels("code") == {host.name: ["green"] for host in cluster}
    finally:
        check_same.same_commit(cluster)
