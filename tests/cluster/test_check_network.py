"""The network's speed on real hosts whose links have a known rate. Faults of it: test_preflight.py."""

import json
import sys

from testbed.check_network import even


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
