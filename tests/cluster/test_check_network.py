"""Faults of the network's speed on real hosts: found, and the right host named."""

import json
import re
import sys

import pytest

from testbed.check_network import FAULTS, even


def check(cluster, *words):
    hostfile = cluster.hostfile(1)
    command = [sys.executable, "-m", "brigade", "check", "--hostfile", str(hostfile), "--json", "-", *words]
    done = cluster["node1"].run(command, check=False, timeout=300, OMP_NUM_THREADS="1")
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return done.returncode, {row["name"]: {one["host"]: one for one in row["results"]} for row in found["checks"]}


def test_no_fault_on_a_sound_network(cluster_of_three):
    even(cluster_of_three)
    code, rows = check(cluster_of_three)
    bad = [one for row in rows.values() for one in row.values() if one["level"] in ("yellow", "red")]
    assert (code, bad) == (0, [])
    assert {one["level"] for one in rows["collectives"].values()} == {"green"}
    assert all(0.3 < one["amount"] < 0.55 for one in rows["pairs"].values())  # of 0.5


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_slow_host_is_named(cluster_of_three, fault):
    fault.arrange(cluster_of_three)
    try:
        code, rows = check(cluster_of_three, *fault.words.split())
    finally:
        fault.heal(cluster_of_three)
    assert code == 3
    found = rows[fault.check]
    assert found[fault.host]["level"] == fault.level
    assert re.search(fault.says, found[fault.host]["problem"])
    assert {host for host, one in found.items() if one["level"] not in ("green", "grey")} == {fault.host}
