"""Another user of the same host, and a machine on the same network, who want a place among the ranks of a live run."""

import json
import re
import time

import pytest

from testing.clusters import SHORT, launch_words
from testing.patience import PATIENCE, wait_until

STRANGER = "setpriv --reuid 65534 --regid 65534 --clear-groups"
# Printed by the run's own user: [port, address, pid] of each socket on which a rank or its launcher waits.
LISTENING = r"""
import json, os, pathlib
rows = []
for name in ("tcp", "tcp6"):
    rows += [line.split() for line in open(f"/proc/net/{name}").readlines()[1:]]
found = []
for process in pathlib.Path("/proc").iterdir():
    try:
        if b"train.py" not in (process / "cmdline").read_bytes():
            continue
        links = {os.readlink(entry) for entry in (process / "fd").iterdir()}
    except (OSError, NotADirectoryError):
        continue
    mine = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    found += [[int(row[1].rpartition(":")[2], 16), row[1].rpartition(":")[0], int(process.name)] for row in mine]
    found += [[0, entry, int(process.name)] for entry in links if "brigade-store" in entry]
print(json.dumps(found))
"""


def connects(host, address: str, port: int) -> bool:
    """Whether another user of a host gets through to a port."""
    line = f"{STRANGER} timeout 3 bash -c 'exec 3<>/dev/tcp/{address}/{port}'"
    return host.run(line, check=False).returncode == 0


@pytest.fixture
def live(cluster):
    """A run of two ranks on node1 that trains: (the process of launch, what its ranks listen on)."""
    folder = cluster.shared / f"second-user-{time.monotonic_ns()}"
    further = "--launcher deepspeed --ds_config ds_configs/zero1.json --no_check --max_steps 60"
    words = launch_words(cluster.hostfile({"node1": 2}), folder, *SHORT, *further.split())
    said = folder.with_suffix(".said")
    with said.open("wb") as out:
        process = cluster["node1"].popen(words, stdout=out, stderr=out, OMP_NUM_THREADS="1")
    wait_until(lambda: "step 1/60" in said.read_text(errors="replace"), process, said.read_text)
    yield process, json.loads(cluster["node1"].run(["python", "-c", LISTENING]).stdout), said
    cluster["node1"].send(process, 15)
    process.wait(PATIENCE)


def test_nobody_but_the_runs_own_user_reaches_its_store_or_its_ranks(cluster, live):
    process, found, said = live
    port = int(re.search(r"lo to 127\.0\.0\.1:(\d+)", said.read_text()).group(1))
    ranks = {pid for number, _, pid in found if number == 0}
    assert len(ranks) == 2, found  # both have the store, which has no name
    # Where the ranks met nobody listens any more: there is no store to join, from here or from elsewhere.
    assert port not in {number for number, _, _ in found}
    assert not connects(cluster["node1"], "127.0.0.1", port)
    assert not connects(cluster["node2"], cluster["node1"].address, port)
    for pid in ranks:
        assert "denied" in cluster["node1"].run(f"{STRANGER} ls /proc/{pid}/fd", check=False).stderr
    # What gloo listens on is the loopback: another machine does not get there.
    doors = [(number, address) for number, address, _ in found if number]
    assert doors and {address for _, address in doors} == {"0100007F"}, doors
    assert not any(connects(cluster["node2"], cluster["node1"].address, number) for number, _ in doors)
    # On this host anybody can knock, and the run goes on: its groups are made, and take nobody in.
    assert all(connects(cluster["node1"], "127.0.0.1", number) for number, _ in doors)
    steps = said.read_text(errors="replace").count("step ")
    wait_until(lambda: said.read_text(errors="replace").count("step ") >= steps + 3, process, seconds=60)
    assert process.poll() is None
