"""The speed of collectives: what a sweep is held against, who hangs or is slow in it, and what it means for a recipe."""

import re

import pytest
import yaml

from brigade.check import sweep, waiting
from brigade.check.checks import Wanted
from brigade.check.collectives import Sweep, floor, judged_inside, judged_sweep
from brigade.hosts.job import make
from testing.meetings import met
from testing.recorded_hosts import Recorded, by_host

ROWS = [[name, payload, payload / 1e9] for name in sweep.BUS for payload in (2**20, 2**26)]
THREE = ("node1", "node2", "node3")
SERVE = {"port": 1, "free": 2, "links": {}, "fabric": 0.0}


def recorded(names=("node1", "node2"), gpus=0, slots=1, faults=None, **answers):
    """Hosts that met and swept."""
    swept = {host: {"figures": ROWS, "device": "CPU", "error": ""} for host in names} | (faults or {})
    way = {"peer": "10.0.0.1", "own": "10.0.0.9", "interface": "eth0"}
    known = {
        "pairs.serve": dict.fromkeys(names, SERVE),
        "pairs.way": {
            host: {"node1": way | {"own": f"10.0.0.{number + 1}"}} for number, host in enumerate(names) if number
        },
        "pairs.send": {host: {"gbit": 1.0, "busy": 0.1} for host in names},
        "collectives.sweep": {host: facts for host, facts in swept.items() if facts},
    }
    hello = {"gpus": gpus, "addresses": {"10.0.0.1": "eth0"}}
    return Recorded(Wanted(dict.fromkeys(names, slots)), known | answers, dict.fromkeys(names, hello))


def test_a_rank_that_died_is_named_with_its_host_and_gpu():
    """NCCL says of a peer that is gone only that a connection was closed, on every other rank."""
    failed = "GPU 0: DistBackendError: NCCL error: remote process exited"
    others = {"figures": [], "device": "", "error": failed, "ended": ""}
    died = others | dict.fromkeys(("error", "ended"), "GPU 3: its process was ended by SIGKILL")
    found = by_host("collectives", recorded(THREE, 8, 8, {"node1": others, "node2": died, "node3": others}))
    assert {host: result.level for host, result in found.items()} == {"node1": "grey", "node2": "red", "node3": "grey"}
    assert died["ended"] in found["node2"].problem and "node2" in found["node1"].problem


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert sweep.bus_bandwidth("all_reduce", 10**9, 1.0, 8) == pytest.approx(1.75e9)
    assert sweep.bus_bandwidth("all_gather", 10**9, 1.0, 8) == pytest.approx(0.875e9)


def test_sound_hosts_are_green_and_hand_on_what_was_measured():
    hosts = recorded(THREE)
    assert {result.level for result in by_host("pairs", hosts).values()} == {"green"}
    found = by_host("collectives", hosts)
    assert {result.value for result in found.values()} == {"all-reduce 1.33 GB/s, gloo"}
    assert hosts.wanted.measured["network"].rate == pytest.approx(2 / 3, rel=1e-3)
    said = by_host("waiting", hosts)["node1"]
    assert said.level == "green"
    assert re.fullmatch(r"ZeRO-3 waits \d+%, [\w-]+ \d+%", said.value)
    assert "by the planner: qwen3-8b, full fine-tuning" in hosts.wanted.measured["meaning"]


def test_one_host_has_nothing_to_exchange():
    hosts = recorded(names=("node1",))
    for name in ("pairs", "every pair", "collectives", "GPUs of a host", "waiting"):
        assert by_host(name, hosts)["node1"].level in ("green", "grey")


def test_a_host_that_nobody_meets_is_named():
    hosts = recorded(THREE)
    hosts.answers["pairs.way"]["node3"] = {"node1": {"error": "no answer within 3 s"}}
    found = by_host("collectives", hosts)
    assert found["node3"].level == "red"
    assert found["node3"].problem == "it cannot connect to node1 on port 1: no answer within 3 s"
    assert found["node1"].level == found["node2"].level == "grey"
    for host in ("node2", "node3"):
        hosts.answers["pairs.way"][host] = {"node1": {"error": "no answer within 3 s"}}
    assert by_host("collectives", hosts)["node1"].level == "red"


def test_a_host_that_hangs_in_a_collective_is_named():
    error = {"figures": [], "device": "CPU", "error": "RuntimeError: Connection closed by peer [10.0.0.3]:4711"}
    for third in (None, error | {"error": "RuntimeError: timed out"}):  # its process gave no answer, or one
        hosts = recorded(THREE, faults={"node1": error, "node2": error, "node3": third})
        found = by_host("collectives", hosts)
        assert [found[host].level for host in THREE] == ["grey", "grey", "red"]
    assert "10.0.0.3" in found["node3"].problem, "the others name its address"


def test_pairs_that_do_not_reach_each_other_spare_the_collectives():
    hosts = recorded(THREE)
    hosts.answers["pairs.send"]["node2"] = {"error": "no answer within 3 s"}
    assert by_host("pairs", hosts)["node2"].level == "red"
    assert {result.level for result in by_host("collectives", hosts).values()} == {"grey"}


def of(device, seconds, ranks=16, hosts=2):
    return Sweep("nccl", ranks, hosts, device, [("all_reduce", 2**30, seconds)])


@pytest.mark.parametrize("device, seconds, level", [
    ("NVIDIA H100 80GB HBM3", 0.004, "green"),  # 503 GB/s
    ("NVIDIA H100 80GB HBM3", 0.008, "yellow"),  # 252
    ("NVIDIA H100 80GB HBM3", 0.02, "red"),
    ("NVIDIA A100-SXM4-80GB", 0.008, "green"),  # of 185
    ("NVIDIA GeForce RTX 4090", 0.008, "green"),  # no floor: a share of the fabric's speed
])  # fmt: skip
def test_gpus_on_a_fabric_are_held_against_the_floor_of_their_kind(device, seconds, level):
    assert judged_sweep("node1", of(device, seconds), met(["node1"], fabric=3200.0)).level == level


def test_nvlink_has_floors_too_and_a_host_is_held_against_the_others():
    assert floor("NVIDIA H100 PCIe", "inside") == {}
    h100 = "NVIDIA H100 80GB HBM3"
    assert judged_inside("node1", of(h100, 0.004, 8, 1), 470.0).level == "green"
    assert judged_inside("node1", of(h100, 0.006, 8, 1), 313.0).level == "yellow"
    assert judged_inside("node1", of("NVIDIA L40S", 0.1, 8, 1), 60.0).level == "red"


def test_a_slow_card_of_the_fabric_is_found_by_pairs_over_nccl():
    rate = {"node1": 3000.0, "node2": 40.0, "node3": 3000.0}
    swept = {"figures": ROWS, "device": "NVIDIA H100 80GB HBM3", "error": ""}
    received = {
        host: [[number, min(rate[other], rate[host])] for number, other in enumerate(THREE) if other != host]
        for host in THREE
    }
    faults = {host: swept | {"received": received[host]} for host in THREE}
    found = by_host("pairs by NCCL", recorded(THREE, 8, 8, faults))
    assert [found[host].level for host in THREE] == ["green", "red", "green"]
    assert "ibstat" in found["node2"].cure
    assert {one.level for one in by_host("pairs by NCCL", recorded(THREE)).values()} == {"grey"}


def test_nvlink_of_each_host_by_itself():
    rows = {"figures": [["all_reduce", 2**30, 0.004]], "device": "NVIDIA H100 80GB HBM3", "error": ""}
    slow = rows | {"figures": [["all_reduce", 2**30, 0.02]]}
    found = by_host("GPUs of a host", recorded(gpus=8, slots=8, faults={"node1": rows, "node2": slow}))
    assert (found["node1"].level, found["node2"].level) == ("green", "red")


# ---- what it means -----------------------------------------------------------------------------------------------
def test_the_recipes_strategy_waits_less_on_a_faster_network():
    job = make("recipes/llama-3.1-8b/full.yaml", [], "hostfiles/2x8")
    wanted = Wanted(job.hosts, job)
    shares = {}
    for seconds in (0.01, 0.1, 10.0):
        rows = [(name, 2**30, seconds) for name in sweep.BUS]
        said = waiting.say(wanted, Sweep("nccl", 16, 2, "NVIDIA H100 80GB HBM3", rows))
        shares[seconds] = said.share
        assert re.search(r"at this bandwidth \(.* GB/s\) \S+ waits \d+% of each step; ", said.sentence)
        assert "on 16 H100 80GB" in said.sentence
    assert shares[0.01] < shares[0.1] < shares[10.0]
    assert shares[10.0] > 0.9


def test_a_measured_bandwidth_goes_into_the_users_file_beside_what_is_there(tmp_path):
    file = tmp_path / "calibration.yaml"
    file.write_text("# mine\nfactors:\n  H100 80GB:\n    efficiency: {factor: 0.9, runs: {/data/one: 0.9}}\n")
    wanted = Wanted({"a": 8, "b": 8})
    for seconds in (0.01, 0.02):  # the second time takes the first one's place
        rows = [(name, 2**30, seconds) for name in sweep.BUS]
        lines = waiting.calibrate(wanted, Sweep("nccl", 16, 2, "NVIDIA H100 80GB HBM3", rows), file)
    assert "H100 80GB: network" in lines[0]
    found = yaml.safe_load(file.read_text())["factors"]["H100 80GB"]
    assert file.read_text().startswith("# mine\n")
    assert found["efficiency"] == {"factor": 0.9, "runs": {"/data/one": 0.9}}
    assert list(found["network"]["runs"]) == ["check of a ... b, 2 hosts"]
    # 3200 Gbit/s of an H100's host, of which 85 % are supposed; measured: the gathers' 15/16 of a GiB in 0.02 s
    assert found["network"]["factor"] == pytest.approx(15 / 16 * 2**30 / 0.02 / (400e9 * 0.85), rel=1e-3)


def test_nothing_is_written_of_what_no_gpu_measured(tmp_path, mistake):
    rows = [(name, 2**20, 0.01) for name in sweep.BUS]
    for measured in (None, Sweep("gloo", 2, 2, "CPU", rows)):
        assert "calibrate" in mistake(waiting.calibrate, Wanted({"a": 1, "b": 1}), measured, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_calibrate_needs_a_measurement_and_a_file(tmp_path, monkeypatch, prints):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["check", "--hostfile", str(tmp_path / "hosts"), "--calibrate"]
    assert "--quick measures no bandwidth" in prints(2, *words, "--quick")
    monkeypatch.setenv("BRIGADE_CALIBRATION", "")
    assert "there is no file to keep factors in" in prints(2, *words)
