"""The network's speed: who meets whom, whose fault a slow pair is, what a sweep is held against, and what it means."""

import asyncio
import io
import itertools
import re
import threading

import pytest
import yaml

from brigade.__main__ import main
from brigade.check import meaning, network, sweep
from brigade.check.bandwidth import Sweep, floor, of_inside, of_sweep
from brigade.check.hosts import Recorded, Wanted
from brigade.check.meeting import Meeting
from brigade.check.probes import network as probe
from brigade.check.run import judge
from brigade.check.slow_pairs import Way, better, blame, judged, to_confirm
from brigade.errors import UserError
from brigade.launch.job import make

NAMES = [f"node{number}" for number in range(1, 6)]


# ---- the plan ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 63, 64])
def test_every_pair_meets_once_in_as_few_rounds_as_there_can_be(count):
    games = sweep.rounds(count, 1000)
    assert len(games) == (count - 1 if count % 2 == 0 else count)
    met = list(itertools.chain(*games))
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for pairs in games:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs) == count - count % 2


def test_of_many_hosts_a_sample_of_rounds_in_which_each_has_other_partners():
    games = sweep.rounds(1000, sweep.FEW)
    assert len(games) == sweep.FEW
    assert all(len(pairs) == 500 for pairs in games)
    assert len(set(itertools.chain(*games))) == 500 * sweep.FEW
    assert sweep.rounds(1, 7) == []


@pytest.mark.parametrize(("hosts", "rounds", "widest"), [(64, 63, 160), (1000, 63, 160)])
def test_dry_run_says_what_would_be_done_and_starts_nothing(tmp_path, monkeypatch, capsys, hosts, rounds, widest):
    (tmp_path / "hosts").write_text("".join(f"node{number} slots=8\n" for number in range(1, hosts + 1)))

    def none_may_start(*words, **options):
        raise AssertionError(f"started {words}")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none_may_start)
    assert main(["check", "--hostfile", str(tmp_path / "hosts"), "--full", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"{hosts:,} hosts, {8 * hosts:,} ranks, full: nothing was started" in said
    assert re.search(rf"every pair +│ +{rounds} │ +{hosts // 2 * rounds * 2 * sweep.STREAMS:,} │", said)
    assert f"({hosts // 2} pairs at the same time)" in said
    table = [line for line in said.splitlines() if "│" in line]
    assert len(table) < 15
    assert max(map(len, table)) <= widest


def test_dry_run_of_two_hosts_without_gpus_speaks_of_gloo(tmp_path, capsys):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    assert main(["check", "--hostfile", str(tmp_path / "hosts"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"collectives +│ +16 │ +1 │ 64 KiB to 64 MiB, gloo", said)
    assert "every pair" not in said


@pytest.mark.parametrize("slots", [1, 8])
def test_dry_run_of_one_host_has_no_pairs(tmp_path, capsys, slots):
    (tmp_path / "hosts").write_text(f"a slots={slots}\n")
    assert main(["check", "--hostfile", str(tmp_path / "hosts"), "--full", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "one host: there are no pairs" in said
    assert ("GPUs of a host" in said) == (slots > 1)
    assert re.search(r"all checks: about [\d,]+ s; at most [\d,]+ s", said)


def test_the_plan_without_a_recipe_has_no_rehearsal_and_its_total_is_below_the_limits():
    slots = dict.fromkeys(NAMES, 8)
    with_one, without = (list(sweep.plan(slots, "full", True, job)) for job in (True, False))
    assert {stage.group for stage in with_one} - {stage.group for stage in without} == {"kernels", "rehearsal"}
    names = {stage.name for stage in without}
    assert names > {"pairs", "pairs by NCCL", "collectives", "GPUs of a host", "waiting"}
    about, most = sweep.total(without)
    assert 0 < about < most < sweep.total(with_one)[1]
    assert not {stage.group for stage in sweep.plan(slots, "full", False)} & {"kernels"}, "there is no GPU"


def test_seconds_stay_whole_on_a_narrow_screen():
    from rich.console import Console

    slots = {f"node{number}": 8 for number in range(1000)}
    stages = list(sweep.plan(slots, "full", True))
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(sweep.table(slots, "full", stages))
    said = screen.export_text()
    assert max(map(len, said.splitlines())) <= 80
    for stage in stages:
        assert f"{'at most' if stage.most else 'about'} {stage.seconds:,.0f}" in said


# ---- pairs -------------------------------------------------------------------------------------------------------
def ways_of(names, rate=lambda a, b: 1.0, **more):
    return {(a, b): Way(rate(a, b), **more) for a in names for b in names if a != b}


def met(names, links=None, fabric=0.0):
    interface = dict.fromkeys(names, "eth0")
    return Meeting(
        "token",
        {host: f"10.0.0.{number + 1}" for number, host in enumerate(names)},
        interface,
        links={host: {"eth0": links or {"speed": None, "real": False}} for host in names},
        fabric=dict.fromkeys(names, fabric),
    )


def levels(ways, names, **more):
    return {result.host: result.level for result in judged(ways, met(names, **more))}


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_host_at_a_tenth_is_named_and_no_other(count):
    names = NAMES[:count]
    ways = ways_of(names, lambda a, b: 0.1 if "node2" in (a, b) else 1.0)
    assert levels(ways, names) == dict.fromkeys(names, "green") | {"node2": "red"}
    result = next(result for result in judged(ways, met(names)) if result.host == "node2")
    assert result.problem == "it sends at 0.10 Gbit/s and receives at 0.10 Gbit/s; 1.00 are usual here"


@pytest.mark.parametrize(("end", "says"), [(0, "it sends at 0.10"), (1, "it receives at 0.10")])
def test_a_host_that_is_slow_in_one_direction(end, says):
    ways = ways_of(NAMES, lambda *pair: 0.1 if pair[end] == "node3" else 1.0)
    result = next(result for result in judged(ways, met(NAMES)) if result.level != "green")
    assert result.host == "node3"
    assert result.problem.startswith(says)
    assert "and" not in result.problem.partition(";")[0]


def test_one_slow_link_is_no_slow_host():
    ways = ways_of(NAMES, lambda a, b: 0.1 if (a, b) == ("node1", "node4") else 1.0)
    found = blame(ways)
    assert found.hosts == []
    assert found.links == [("node1", "node4")]
    assert levels(ways, NAMES) == dict.fromkeys(NAMES, "green") | {"node1": "red"}


def test_two_hosts_and_a_slow_way_between_them():
    ways = {("node1", "node2"): Way(0.1), ("node2", "node1"): Way(1.0)}
    results = judged(ways, met(NAMES[:2]))
    assert [result.level for result in results] == ["red", "green"]
    assert "with two hosts nobody can say which one is slow" in results[0].problem


def test_a_third_of_the_usual_is_a_warning():
    assert levels(ways_of(NAMES, lambda a, b: 0.35 if "node2" in (a, b) else 1.0), NAMES)["node2"] == "yellow"


def test_what_a_busy_processor_bounded_blames_nobody():
    names = NAMES[:3]
    ways = {pair: Way(0.1 if "node2" in pair else 30.0, busy=0.9) for pair in ways_of(names)}
    assert set(levels(ways, names).values()) == {"green"}


def test_a_slow_way_is_measured_again_before_anybody_is_blamed():
    ways = ways_of(NAMES, lambda a, b: 0.1 if "node2" in (a, b) else 1.0)
    again = to_confirm(ways, blame(ways))
    assert again
    assert all("node2" in pair for pair in again)
    assert to_confirm(ways_of(NAMES), blame(ways_of(NAMES))) == []
    assert better(Way(0.1), Way(0.9)).gbit == 0.9
    assert better(Way(error="refused"), Way(0.1)).gbit == 0.1
    assert better(Way(0.1), Way(error="refused")).gbit == 0.1


def test_a_host_that_takes_no_connections():
    ways = ways_of(NAMES) | {(a, "node5"): Way(error="no answer within 3 s") for a in NAMES[:4]}
    result = next(result for result in judged(ways, met(NAMES)) if result.level != "green")
    assert (result.host, result.level) == ("node5", "red")
    assert "takes no connections from most hosts (no answer within 3 s)" in result.problem


def test_a_card_far_below_its_own_speed_and_a_veth_that_claims_one():
    ways = ways_of(NAMES, lambda a, b: 1.0, busy=0.1)
    assert set(levels(ways, NAMES, links={"speed": 10_000, "real": True}).values()) == {"red"}
    assert set(levels(ways, NAMES, links={"speed": 1_000, "real": True}).values()) == {"green"}
    assert set(levels(ways, NAMES, links={"speed": 10_000, "real": False}).values()) == {"green"}


def test_the_probe_measures_and_refuses_whom_it_does_not_know():
    serving = probe.serve("secret")
    try:
        port = next(serving)["port"]
        tried = probe.way(["127.0.0.1", "127.0.0.2"], port, "secret")
        assert {one["peer"] for one in tried.values()} == {"127.0.0.1", "127.0.0.2"}
        assert probe.way(["127.0.0.1"], port, "other")["127.0.0.1"].keys() == {"error"}
        found = probe.send("127.0.0.1", port, "secret", 2, 0.02, 0.1)
        assert found["gbit"] > 0
        assert "error" in probe.send("127.0.0.1", port, "other", 1, 0.02, 0.1)
    finally:
        serving.close()
    closed = next(unused := probe.serve("secret"))["free"]
    assert probe.send("127.0.0.1", closed, "secret", 1, 0.02, 0.1) == {"error": "Connection refused"}
    unused.close()
    assert threading.active_count() < 50


# ---- collectives -------------------------------------------------------------------------------------------------
ROWS = [[name, payload, payload / 1e9] for name in sweep.BUS for payload in (2**20, 2**26)]
SERVE = {"port": 1, "free": 2, "links": {}, "fabric": 0.0}


def recorded(names=("node1", "node2"), gpus=0, slots=1, faults=None, **answers):
    """Hosts that met and swept."""
    swept = {host: {"figures": ROWS, "device": "CPU", "error": ""} for host in names} | (faults or {})
    way = {"peer": "10.0.0.1", "own": "10.0.0.9", "interface": "eth0"}
    known = {
        "network.serve": dict.fromkeys(names, SERVE),
        "network.way": {
            host: {"node1": way | {"own": f"10.0.0.{number + 1}"}} for number, host in enumerate(names) if number
        },
        "network.send": {host: {"gbit": 1.0, "busy": 0.1} for host in names},
        "collectives.sweep": {host: facts for host, facts in swept.items() if facts},
    }
    hello = {"gpus": gpus, "addresses": {"10.0.0.1": "eth0"}}
    return Recorded(Wanted(dict.fromkeys(names, slots)), known | answers, dict.fromkeys(names, hello))


def results(name, hosts):
    from brigade.check.registry import checks

    check = next(check for check in checks() if check.name == name)
    return {result.host: result for result in asyncio.run(judge(check, hosts))}


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert sweep.bus_bandwidth("all_reduce", 10**9, 1.0, 8) == pytest.approx(1.75e9)
    assert sweep.bus_bandwidth("all_gather", 10**9, 1.0, 8) == pytest.approx(0.875e9)


def test_sound_hosts_are_green_and_hand_on_what_was_measured():
    hosts = recorded(names=("node1", "node2", "node3"))
    assert {result.level for result in results("pairs", hosts).values()} == {"green"}
    found = results("collectives", hosts)
    assert {result.value for result in found.values()} == {"all-reduce 1.33 GB/s, gloo"}
    assert hosts.wanted.measured["network"].rate == pytest.approx(2 / 3, rel=1e-3)
    said = results("waiting", hosts)["node1"]
    assert said.level == "green"
    assert re.fullmatch(r"ZeRO-3 waits \d+%, [\w-]+ \d+%", said.value)
    assert "by the planner: qwen3-8b, full fine-tuning" in hosts.wanted.measured["meaning"]


def test_one_host_has_nothing_to_exchange():
    hosts = recorded(names=("node1",))
    for name in ("pairs", "every pair", "collectives", "GPUs of a host", "waiting"):
        assert results(name, hosts)["node1"].level in ("green", "grey")


def test_a_host_that_nobody_meets_is_named():
    hosts = recorded(names=("node1", "node2", "node3"))
    hosts.answers["network.way"]["node3"] = {"node1": {"error": "no answer within 3 s"}}
    found = results("collectives", hosts)
    assert found["node3"].level == "red"
    assert found["node3"].problem == "it cannot connect to node1 on port 1: no answer within 3 s"
    assert found["node1"].level == found["node2"].level == "grey"
    for host in ("node2", "node3"):
        hosts.answers["network.way"][host] = {"node1": {"error": "no answer within 3 s"}}
    assert results("collectives", hosts)["node1"].level == "red"


def test_a_host_that_hangs_in_a_collective_is_named():
    error = {"figures": [], "device": "CPU", "error": "RuntimeError: Connection closed by peer [10.0.0.3]:4711"}
    names = ("node1", "node2", "node3")
    hosts = recorded(names, faults={"node1": error, "node2": error, "node3": None})
    found = results("collectives", hosts)  # its process gave no answer
    assert [found[host].level for host in names] == ["grey", "grey", "red"]
    hosts = recorded(
        names, faults={"node1": error, "node2": error, "node3": error | {"error": "RuntimeError: timed out"}}
    )
    found = results("collectives", hosts)  # the others name its address
    assert [found[host].level for host in names] == ["grey", "grey", "red"]
    assert "10.0.0.3" in found["node3"].problem


def test_pairs_that_do_not_reach_each_other_spare_the_collectives():
    hosts = recorded(names=("node1", "node2", "node3"))
    hosts.answers["network.send"]["node2"] = {"error": "no answer within 3 s"}
    assert results("pairs", hosts)["node2"].level == "red"
    assert {result.level for result in results("collectives", hosts).values()} == {"grey"}


def of(device, seconds, ranks=16, hosts=2):
    return Sweep("nccl", ranks, hosts, device, [("all_reduce", 2**30, seconds)])


@pytest.mark.parametrize(
    ("device", "seconds", "level"),
    [
        ("NVIDIA H100 80GB HBM3", 0.004, "green"),  # 503 GB/s
        ("NVIDIA H100 80GB HBM3", 0.008, "yellow"),  # 252
        ("NVIDIA H100 80GB HBM3", 0.02, "red"),
        ("NVIDIA A100-SXM4-80GB", 0.008, "green"),  # of 185
        ("NVIDIA GeForce RTX 4090", 0.008, "green"),  # no floor: a share of the fabric's speed
    ],
)
def test_gpus_on_a_fabric_are_held_against_the_floor_of_their_kind(device, seconds, level):
    assert of_sweep("node1", of(device, seconds), met(["node1"], fabric=3200.0)).level == level


def test_nvlink_has_floors_too_and_a_host_is_held_against_the_others():
    assert floor("NVIDIA H100 PCIe", "inside") == {}
    h100 = "NVIDIA H100 80GB HBM3"
    assert of_inside("node1", of(h100, 0.004, 8, 1), 470.0).level == "green"
    assert of_inside("node1", of(h100, 0.006, 8, 1), 313.0).level == "yellow"
    assert of_inside("node1", of("NVIDIA L40S", 0.1, 8, 1), 60.0).level == "red"


def test_a_slow_card_of_the_fabric_is_found_by_pairs_over_nccl():
    names = ("node1", "node2", "node3")
    rate = {name: 40.0 if name == "node2" else 3000.0 for name in names}
    faults = {
        host: {
            "figures": ROWS,
            "device": "NVIDIA H100 80GB HBM3",
            "error": "",
            "received": [[number, min(rate[other], rate[host])] for number, other in enumerate(names) if other != host],
        }
        for host in names
    }
    found = results("pairs by NCCL", recorded(names, gpus=8, slots=8, faults=faults))
    assert [found[host].level for host in names] == ["green", "red", "green"]
    assert "ibstat" in found["node2"].cure
    assert {one.level for one in results("pairs by NCCL", recorded(names)).values()} == {"grey"}


def test_nvlink_of_each_host_by_itself():
    rows = {"figures": [["all_reduce", 2**30, 0.004]], "device": "NVIDIA H100 80GB HBM3", "error": ""}
    hosts = recorded(
        gpus=8, slots=8, faults={"node1": rows, "node2": rows | {"figures": [["all_reduce", 2**30, 0.02]]}}
    )
    found = results("GPUs of a host", hosts)
    assert (found["node1"].level, found["node2"].level) == ("green", "red")


# ---- what it means -----------------------------------------------------------------------------------------------
def test_the_recipes_strategy_waits_less_on_a_faster_network():
    job = make("recipes/llama-3.1-8b/full.yaml", [], "hostfiles/2x8")
    wanted = Wanted(job.hosts, job)
    shares = {}
    for seconds in (0.01, 0.1, 10.0):
        rows = [(name, 2**30, seconds) for name in sweep.BUS]
        said = meaning.say(wanted, Sweep("nccl", 16, 2, "NVIDIA H100 80GB HBM3", rows))
        shares[seconds] = said.share
        assert re.search(r"at this bandwidth \(.* GB/s\) \S+ waits \d+% of each step; ", said.sentence)
        assert "on 16 H100 80GB" in said.sentence
    assert shares[0.01] < shares[0.1] < shares[10.0]
    assert shares[10.0] > 0.9


def test_a_measured_bandwidth_goes_into_the_users_file_beside_what_is_there(tmp_path):
    file = tmp_path / "calibration.yaml"
    file.write_text("# mine\nfactors:\n  H100 80GB:\n    efficiency: {factor: 0.9, runs: {/data/one: 0.9}}\n")
    wanted = Wanted({"a": 8, "b": 8})
    rows = [(name, 2**30, 0.01) for name in sweep.BUS]
    for seconds in (0.01, 0.02):  # the second time takes the first one's place
        rows = [(name, 2**30, seconds) for name in sweep.BUS]
        lines = meaning.calibrate(wanted, Sweep("nccl", 16, 2, "NVIDIA H100 80GB HBM3", rows), file)
    assert "H100 80GB: network" in lines[0]
    found = yaml.safe_load(file.read_text())["factors"]["H100 80GB"]
    assert file.read_text().startswith("# mine\n")
    assert found["efficiency"] == {"factor": 0.9, "runs": {"/data/one": 0.9}}
    assert list(found["network"]["runs"]) == ["check of a ... b, 2 hosts"]
    # 3200 Gbit/s of an H100's host, of which 85 % are supposed; measured: the gathers' 15/16 of a GiB in 0.02 s
    assert found["network"]["factor"] == pytest.approx(15 / 16 * 2**30 / 0.02 / (400e9 * 0.85), rel=1e-3)


def test_nothing_is_written_of_what_no_gpu_measured(tmp_path):
    rows = [(name, 2**20, 0.01) for name in sweep.BUS]
    for measured in (None, Sweep("gloo", 2, 2, "CPU", rows)):
        with pytest.raises(UserError, match="calibrate"):
            meaning.calibrate(Wanted({"a": 1, "b": 1}), measured, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_calibrate_needs_a_measurement_and_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["check", "--hostfile", str(tmp_path / "hosts"), "--calibrate"]
    assert main([*words, "--quick"]) == 2
    assert "--quick measures no bandwidth" in capsys.readouterr().err
    monkeypatch.setenv("BRIGADE_CALIBRATION", "")
    assert main(words) == 2
    assert "there is no file to keep factors in" in capsys.readouterr().err


def test_all_checks_of_the_network_say_what_they_read():
    assert all("Threshold" in check.__doc__ or "As pairs" in check.__doc__ for check in (
        network.pairs, network.every_pair, network.pairs_by_nccl, network.collectives, network.inside, network.waiting,
    ))  # fmt: skip
