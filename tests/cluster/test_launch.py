"""`python -m brigade launch` on real hosts: every launcher trains with the single process's losses."""

import json
import re
import shutil
import time

import pytest
import yaml

from brigade.train.checkpoint import manifest
from testing import marks
from testing.clusters import SHORT, launch_words
from testing.launches import SECRET
from testing.patience import PATIENCE
from testing.ranks import REPOSITORY
from testing.run_files import losses_of

# launcher -> slots per host, flags, strategy
BOTH = {"node1": 1, "node2": 1}
LAUNCHES = {
    "torchrun": (BOTH, [], "ddp"),
    "deepspeed": (BOTH, ["--ds_config", "ds_configs/zero3.json"], "zero3"),
    "accelerate": (BOTH, ["--accelerate_config", "accelerate_configs/fsdp2_2x8.yaml"], "fsdp2"),
    # Tensor groups inside the hosts, and the pipeline across them.
    "torchrun in 3D": ({"node1": 2, "node2": 2}, ["--ds_config", "ds_configs/zero1_tp2_pp2.json"], "zero1_tp2_pp2"),
    # An address that every host has and nobody reaches must not be taken for the first host's; and hosts of different sizes.
    "torchrun among decoys": ({"node1": 1, "node2": 3}, ["--ds_config", "ds_configs/zero2.json"], "zero2"),
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


@pytest.mark.parametrize("name", marks.cases(
    *("deepspeed", "accelerate", "torchrun among decoys"),
    matrix=["torchrun", "torchrun in 3D", "torchrun from elsewhere"],
))  # fmt: skip
def test_each_launcher_trains_as_one_process_does(cluster, request, single, name):
    slots, flags, strategy = LAUNCHES[name]
    launcher = name.split()[0]
    if "decoys" in name:
        request.getfixturevalue("decoys")
    hostfile, folder = cluster.hostfile(slots), cluster.shared / name.replace(" ", "-")
    words = launch_words(hostfile, folder, "--launcher", launcher, *SHORT, *flags)
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
    assert losses_of(folder / "run") == pytest.approx(single, rel=1e-5)
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


# ---- hosts that do not see the same ------------------------------------------------------------------------------
def launch(cluster, output, *flags) -> tuple[int, str]:
    """Exit code and words of a short run on both hosts."""
    folder = cluster.shared / f"launch-{time.monotonic_ns()}"
    further = ["--launcher", "torchrun", *SHORT, *flags, "--output_dir", str(output)]
    words = launch_words(cluster.hostfile(BOTH), folder, *further)
    done = cluster["node1"].run(words, timeout=PATIENCE, check=False, OMP_NUM_THREADS="1")
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def apart(cluster):
    """A directory of the same name on both hosts, of which each has its own: its paths as this machine sees them."""
    seen, hidden = cluster.shared / "apart", cluster.shared / "of-node2"
    for folder in (seen, hidden):
        folder.mkdir()
    cluster["node2"].bind(hidden, seen)
    yield seen, hidden
    cluster["node2"].unbind(seen)


def test_an_output_directory_that_hosts_do_not_share(cluster, apart, single):
    """ZeRO would save a part of each checkpoint on each host; DDP saves it whole on both, and continues from there. That checks
    find it, and that launch then refuses: test_preflight.py."""
    here, there = apart
    code, said = launch(cluster, here / "run", "--ds_config", "ds_configs/zero3.json", "--no_check")
    assert code == 2 and "node2 does not see what node1 writes there, and zero3 writes a part" in said, said
    assert not any(here.iterdir()) and not any(there.iterdir())

    code, said = launch(cluster, here / "run", "--save_steps", "2", "--no_check")
    assert code == 0 and "on each host its own" in " ".join(said.split()), said
    for run in (here / "run", there / "run"):
        assert (run / "checkpoint-2" / "model.safetensors").exists() and (run / "model.safetensors").exists()
    shutil.rmtree(there / "run" / "checkpoint-4")  # node2 died before it had its name
    (here / "run" / "success.json").unlink()
    code, said = launch(cluster, here / "run", "--save_steps", "2", "--no_check")
    told = " ".join(said.split())
    assert code == 0 and f"from {here / 'run' / 'checkpoint-2'}" in told, said
    assert "checkpoint-4: not all hosts have it whole" in told
    for run in (here / "run", there / "run"):
        assert manifest.flaw(run / "checkpoint-4") is manifest.damage(run / "checkpoint-4") is None
    assert losses_of(here / "run") == pytest.approx(single, rel=1e-5)


def test_a_model_that_is_another_on_one_host(cluster):
    """Its losses would be wrong, and nothing would show it."""
    model = cluster.shared / "model"
    shutil.copytree(REPOSITORY / "recipes/tiny", model)
    other = cluster.shared / "other.json"
    other.write_text(json.dumps(json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 1e-3}))
    cluster["node2"].bind(other, model / "config.json")
    try:
        code, said = launch(cluster, cluster.shared / "refused", "--model_name_or_path", str(model))
    finally:
        cluster["node2"].unbind(model / "config.json")
    assert code == 2 and "the model's configuration: rms_norm_eps" in said, said
    assert re.search(r"0\.001 on node2, but 1e-0\d on node1, rank 0", said)
    assert not (cluster.shared / "refused").exists()
