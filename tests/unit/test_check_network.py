"""Who meets whom on the network, and whose fault a slow pair is."""

import asyncio
import io
import itertools
import re
import threading

import pytest

from brigade.__main__ import main
from brigade.check import sweep
from brigade.check.pairs import Way, better, blame, judged_pairs, to_confirm
from brigade.check.probes import pairs as probe
from testing.meetings import met
from testing.work import lines_executed

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
def test_dry_run_says_what_would_be_done_and_starts_nothing(tmp_path, monkeypatch, prints, hosts, rounds, widest):
    (tmp_path / "hosts").write_text("".join(f"node{number} slots=8\n" for number in range(1, hosts + 1)))

    def none_may_start(*words, **options):
        raise AssertionError(f"started {words}")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none_may_start)
    said = prints(0, "check", "--hostfile", str(tmp_path / "hosts"), "--full", "--dry-run")
    assert f"{hosts:,} hosts, {8 * hosts:,} ranks, full: nothing was started" in said
    assert re.search(rf"every pair +│ +{rounds} │ +{hosts // 2 * rounds * 2 * sweep.STREAMS:,} │", said)
    assert f"({hosts // 2} pairs at the same time)" in said
    table = [line for line in said.splitlines() if "│" in line]
    assert len(table) < 15
    assert max(map(len, table)) <= widest


@pytest.mark.parametrize("count", range(12))
def test_rounds_are_counted_without_building_them(count):
    for most in (1, sweep.FEW, 1000):
        games = sweep.rounds(count, most)
        assert sweep.count_rounds(count, most) == len(games)
        assert all(len(pairs) == count // 2 for pairs in games)


def test_the_work_of_a_dry_run_grows_with_the_hosts_and_not_with_their_pairs(tmp_path, capsys):
    def work(hosts: int) -> int:
        (tmp_path / "hosts").write_text("".join(f"node{number} slots=8\n" for number in range(hosts)))
        return lines_executed(lambda: main(["check", "--hostfile", str(tmp_path / "hosts"), "--full", "--dry-run"]))

    work(8)  # what only the first call does
    few, more, many = work(200), work(400), work(800)
    assert many - more == pytest.approx(2 * (more - few), rel=0.1)


def test_dry_run_of_two_hosts_without_gpus_speaks_of_gloo(tmp_path, prints):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    said = prints(0, "check", "--hostfile", str(tmp_path / "hosts"), "--dry-run")
    assert re.search(r"collectives +│ +16 │ +1 │ 64 KiB to 64 MiB, gloo", said)
    assert "every pair" not in said


@pytest.mark.parametrize("slots", [1, 8])
def test_dry_run_of_one_host_has_no_pairs(tmp_path, prints, slots):
    (tmp_path / "hosts").write_text(f"a slots={slots}\n")
    said = prints(0, "check", "--hostfile", str(tmp_path / "hosts"), "--full", "--dry-run")
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


def levels(ways, names, **more):
    return {result.host: result.level for result in judged_pairs(ways, met(names, **more))}


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_host_at_a_tenth_is_named_and_no_other(count):
    names = NAMES[:count]
    ways = ways_of(names, lambda a, b: 0.1 if "node2" in (a, b) else 1.0)
    assert levels(ways, names) == dict.fromkeys(names, "green") | {"node2": "red"}
    result = next(result for result in judged_pairs(ways, met(names)) if result.host == "node2")
    assert result.problem == "it sends at 0.10 Gbit/s and receives at 0.10 Gbit/s; 1.00 are usual here"


@pytest.mark.parametrize(("end", "says"), [(0, "it sends at 0.10"), (1, "it receives at 0.10")])
def test_a_host_that_is_slow_in_one_direction(end, says):
    ways = ways_of(NAMES, lambda *pair: 0.1 if pair[end] == "node3" else 1.0)
    result = next(result for result in judged_pairs(ways, met(NAMES)) if result.level != "green")
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
    results = judged_pairs(ways, met(NAMES[:2]))
    assert [result.level for result in results] == ["red", "green"]
    assert "with two hosts nobody can say which one is slow" in results[0].problem


def test_lost_packets_and_long_ways_are_told_with_their_figures():
    def found(**more):
        slow = {pair: Way(0.1, **more) for pair in ways_of(NAMES) if "node2" in pair}
        usual = ways_of(NAMES, lost=0.0001, round_trip=0.2)
        return {result.host: result for result in judged_pairs(usual | slow, met(NAMES))}["node2"]

    assert "cable" in found(round_trip=0.2).cure and found(round_trip=0.2).problem.endswith("are usual here")
    lossy = found(lost=0.031, round_trip=0.3)
    assert lossy.problem.endswith("; 3.1 % of the packets are lost and sent again") and "ethtool -S" in lossy.cure
    far = found(round_trip=52.0)
    assert far.problem.endswith("; a round trip takes 52.0 ms, 0.2 elsewhere") and "VPN" in far.cure
    assert "cable" not in far.cure
    both = {("node1", "node2"): Way(0.1, lost=0.02, round_trip=40), ("node2", "node1"): Way(1.0, round_trip=40)}
    said = {result.host: result for result in judged_pairs(both, met(NAMES[:2]))}["node1"]
    assert "a round trip takes 40.0 ms and 2.0 % of the packets are lost" in said.problem


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
    result = next(result for result in judged_pairs(ways, met(NAMES)) if result.level != "green")
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
        assert found["gbit"] > 0 and 0 <= found["lost"] < 1 and 0 < found["round_trip"] < 1000
        assert "error" in probe.send("127.0.0.1", port, "other", 1, 0.02, 0.1)
    finally:
        serving.close()
    closed = next(unused := probe.serve("secret"))["free"]
    assert probe.send("127.0.0.1", closed, "secret", 1, 0.02, 0.1) == {"error": "Connection refused"}
    unused.close()
    assert threading.active_count() < 50
