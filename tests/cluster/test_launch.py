"""`python -m brigade launch` on real hosts: every launcher trains with the single process's losses."""

import json
import re
import time

import pytest
import yaml

from tests.cluster.conftest import SHORT, losses
from tests.unit.test_hosts import SECRET

# launcher -> slots per host, flags, strategy
BOTH = {"node1": 1, "node2": 1}
LAUNCHES = {
    "torchrun": ({"node1": 1, "node2": 3}, [], "ddp"),  # hosts of different sizes
    "deepspeed": (BOTH, ["--ds_config", "ds_configs/zero3.json"], "zero3"),
    "accelerate": (BOTH, ["--accelerate_config", "accelerate_configs/fsdp2_2x8.yaml"], "fsdp2"),
    # An address that every host has and nobody reaches must not be taken for the first host's.
    "torchrun among decoys": (BOTH, ["--ds_config", "ds_configs/zero2.json"], "zero2"),
    "torchrun from elsewhere": ({"node2": 2}, [], "ddp"),  # node1, where it is typed, has no part in the run
}


@pytest.fixture
def decoys(cluster):
    """docker0 with one and the same address on every host, and a hosts file that calls each host itself 127.0.1.1."""
    for host in cluster:
        own = host.directory / "debian_hosts"
        own.write_text(f"127.0.1.1 {host.name}\n" + (cluster.directory / "etc_hosts").read_text())
        host.bind(own, "/etc/hosts")
        host.run("ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up")
    yield
    for host in cluster:
        host.unbind("/etc/hosts")
        host.run("ip link del docker0")


@pytest.mark.parametrize("name", LAUNCHES)
def test_each_launcher_trains_as_one_process_does(cluster, request, single, name):
    slots, flags, strategy = LAUNCHES[name]
    launcher = name.split()[0]
    if "decoys" in name:
        request.getfixturevalue("decoys")
    hostfile, folder = cluster.hostfile(slots), cluster.shared / name.replace(" ", "-")
    words = ["python", "-m", "brigade", "launch", "recipes/tiny/full.yaml", "--hostfile", str(hostfile), "--launcher",
             launcher, "--log_dir", str(folder / "logs"), *SHORT, *flags, "--output_dir", str(folder / "run")]  # fmt: skip
    said, seen = folder.with_suffix(".said"), ""
    with said.open("wb") as out:
        process = cluster["node1"].popen(words, stdout=out, stderr=out, OMP_NUM_THREADS="1", HF_TOKEN=SECRET)
    deadline = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < deadline:  # no secret on any command line, at any time
        time.sleep(0.5)  # the first of them is `env HF_TOKEN=...`, this test's own
        seen += " ".join(line for host in cluster for line in host.processes().values())
    said = said.read_text()
    assert process.returncode == 0, said
    assert "train.py" in seen and SECRET not in seen
    ranks = sum(slots.values())
    assert f"world size {ranks} on {len(slots)} host" in said and f"strategy       {strategy} " in said
    record = yaml.safe_load((folder / "run" / "run.yaml").read_text())["run"]
    assert record["hosts"] == list(slots) and record["ranks"] == ranks
    assert json.loads((folder / "run" / "success.json").read_text())["steps"] == 4
    assert losses(folder / "run") == pytest.approx(single, rel=1e-5)
    # One status line per host and change, one log per rank and launcher, rank 0's output on the terminal.
    for host, number in slots.items():
        ranks = "1 rank" if number == 1 else f"{number} ranks"
        assert re.search(
            rf"^{host} +starting {ranks} by {launcher}, (eth0 to 10\.77\.0\.1|lo to 127\.0\.0\.1):\d+$", said, re.M
        )
        assert re.search(rf"^{host} +done$", said, re.M)
    hosts = [host for host, number in slots.items() for _ in range(number)]
    logs = {f"rank-{rank}-{host}.log" for rank, host in enumerate(hosts)}  # of a rank that prints nothing there is none
    found = {path.name for path in (folder / "logs").iterdir()}
    assert found <= logs | {f"launcher-{host}.log" for host in slots}
    assert "step 4/4" in (folder / "logs" / f"rank-0-{hosts[0]}.log").read_text()
    everything = "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    assert SECRET not in everything + said
