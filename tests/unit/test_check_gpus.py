"""What check says of GPUs, from answers of NVML as NVIDIA documents them (tests/data/nvml/), and of Xid errors."""

import copy
import errno
import os
import re
import sys

import pytest

from brigade.check import gpus as of_gpus
from brigade.check.checks import NotHere
from brigade.check.probes import gpus as probe
from brigade.train.recipe.files import REPOSITORY
from testing.gpus import KINDS, ROWS, facts, judged, levels, stand_in  # noqa: F401  a fixture

BROKEN = [(kind, name) for kind, said in KINDS.items() for name in said["broken"]]


def broken_host(kind, name):
    """What a host answers of which GPU 1 is broken so, or all it has in common."""
    broken = KINDS[kind]["broken"][name]
    answer = facts(kind, broken["says"])
    if broken.get("only"):
        answer["gpus"][1] = {"index": 1, **broken["says"]}
    return answer


def test_the_kinds_that_matter_are_there():
    assert sorted(KINDS) == ["a100-sxm", "h100-sxm", "rtx-4090"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS)
def test_sound_gpus_are_sound(kind, row):
    """A consumer card too: it counts no errors, has no NVLink, and runs its PCIe link slowly while it idles."""
    found = judged(row, {f"node{n}": facts(kind) for n in (1, 2)}, slots=KINDS[kind]["count"])
    assert levels(found) == {"node1": {"green"}, "node2": {"green"}}, found


@pytest.mark.parametrize(("kind", "name"), BROKEN)
def test_a_broken_gpu_is_found_by_its_row_and_by_no_other(kind, name):
    broken = KINDS[kind]["broken"][name]
    answers = {f"node{n}": facts(kind) for n in (1, 2, 3)}
    answers["node2"] = broken_host(kind, name)
    for row in ROWS:
        found = judged(row, answers, slots=KINDS[kind]["count"])
        assert levels(found)["node1"] == levels(found)["node3"] == {"green"}
        if row != broken["row"]:
            if name != "another kind":  # whose other figures are compared with its own kind's
                assert levels(found)["node2"] == {"green"}, row
            continue
        (result,) = found["node2"]
        assert result.level == broken["level"]
        assert broken["problem"] in result.problem
        assert result.why
        assert result.cure
        assert "{" not in result.cure


def test_gpus_with_the_same_fault_are_one_result():
    answers = {"node1": facts("h100-sxm", {"uncorrected": 2})}
    answers["node1"]["gpus"][5]["uncorrected"] = 2
    (result,) = judged("gpu memory errors", answers)["node1"]
    assert result.problem.startswith("GPUs 1, 5: 2 errors")
    assert "-i 1,5" in result.cure


def test_peers_that_do_not_reach_each_other():
    answers = {f"node{n}": facts("a100-sxm") for n in (1, 2)}
    answers["node2"]["peers"][0][2] = 4
    (_, result) = judged("gpu links", answers)["node2"]
    assert (result.level, result.value) == ("red", "no peer access")
    assert result.problem.startswith("27 of 28 pairs")
    consumer = {f"node{n}": facts("rtx-4090") for n in (1, 2)}
    consumer["node1"]["peers"][0][2] = 0  # a driver that allows it, on one host
    assert [r.level for r in judged("gpu links", consumer, slots=2)["node2"]] == ["green", "yellow"]


def test_a_fabric_manager_that_cannot_be_seen_is_unknown():
    answers = {"node1": facts("a100-sxm") | {"fabric_manager": False}}
    assert [r.level for r in judged("gpu links", answers)["node1"]] == ["green", "grey"]
    joined = {"node1": facts("h100-sxm") | {"fabric_manager": False}}  # the GPUs themselves say that they have joined
    assert levels(judged("gpu links", joined)) == {"node1": {"green"}}


@pytest.mark.parametrize("count, slots, level, says", [
    (8, 8, "green", ""),
    (7, 8, "red", "slots=8 in the hostfile, but it has 7 GPUs"),
    (0, 8, "red", "slots=8 in the hostfile, but it has 0 GPUs"),
    (None, 8, "red", "nvidia-smi fails"),
    (8, 4, "yellow", "slots=4 in the hostfile, but it has 8 GPUs"),
])  # fmt: skip
def test_gpus_are_counted_against_the_slots(count, slots, level, says):
    answers = {"node1": facts("h100-sxm"), "node2": facts("h100-sxm")}
    found = judged("gpus", answers, slots, {"node2": count, "node1": slots})
    assert found["node1"][0].level == "green"
    (result,) = found["node2"]
    assert result.level == level
    assert says in result.problem


def test_some_gpus_of_a_mixed_host_may_be_others_than_those_that_were_looked_at():
    """CUDA numbers the fastest first."""
    mixed = facts("rtx-4090", {"name": "NVIDIA GeForce RTX 3090"})
    some = judged("gpus", {"node1": mixed}, 1)["node1"]
    assert "another order" in {result.value for result in some} and {result.level for result in some} == {"yellow"}
    by_bus = judged("gpus", {"node1": mixed}, 1, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})["node1"]
    every = judged("gpus", {"node1": mixed}, 2)["node1"]
    assert "another order" not in {result.value for result in [*by_bus, *every]}


def test_hidden_devices_do_not_count():
    hidden = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert levels(judged("gpus", {"node1": facts("h100-sxm")}, 4, environment=hidden)) == {"node1": {"green"}}
    assert levels(judged("gpus", {"node1": facts("h100-sxm")}, 8, environment=hidden)) == {"node1": {"red"}}


def test_without_gpus_one_row_says_so_and_the_others_are_left_out():
    answers, none = {"node1": {}, "node2": {}}, {"node1": 0, "node2": 0}
    assert levels(judged("gpus", answers, 1, none)) == {"node1": {"grey"}, "node2": {"grey"}}
    for row in ROWS[1:]:
        with pytest.raises(NotHere):
            judged(row, answers, 1, none)


def test_without_nvml_gpus_are_counted_all_the_same():
    answers = {"node1": {"absent": "nvidia-ml-py is not installed there"}}
    (result,) = judged("gpus", answers, 2, {"node1": 2})["node1"]
    assert (result.level, result.problem) == ("grey", "2 GPUs, and nothing more: nvidia-ml-py is not installed there")
    assert judged("gpus", answers, 3, {"node1": 2})["node1"][0].level == "red"
    mixed = {"node1": facts("rtx-4090"), "node2": {"problem": "Driver/library version mismatch"}}
    assert judged("gpus", mixed, 2)["node2"][0].problem == "NVML: Driver/library version mismatch"
    assert levels(judged("gpu clocks", mixed, 2)) == {"node1": {"green"}, "node2": {"grey"}}


OTHERS = [(kind, name) for kind, name in BROKEN if KINDS[kind]["broken"][name]["level"] == "red"]


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_a_broken_gpu_that_no_rank_gets_is_a_warning_at_most(kind, name):
    broken = KINDS[kind]["broken"][name]
    answers = {"node1": facts(kind), "node2": broken_host(kind, name)}
    first = judged(broken["row"], answers, 1, environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert levels(first)["node2"] <= {"yellow", "green"}  # of one GPU no NVLink is judged
    assert all("not among this run's" in one.problem for one in first["node2"] if one.level == "yellow")
    if kind != "rtx-4090":
        some = judged(broken["row"], answers, 4, environment={"CUDA_VISIBLE_DEVICES": "0,2,3,4"})
        assert levels(some)["node2"] == {"yellow"}
        assert "red" in levels(judged(broken["row"], answers, 2))["node2"]  # the first ones, without the variable


@pytest.mark.parametrize("visible, slots, ours", [
    (None, 3, [0, 1, 2]),
    ("3, 1", 2, [3, 1]),
    ("3,1,0", 2, [3, 1]),
    ("GPU-b2,0", 2, [2, 0]),
    ("0000:03:00.0", 1, [3]),
    ("0,-1,2", 3, [0]),
    ("GPU-", 1, []),  # which one?
    ("", 1, []),
    ("MIG-c6d4", 1, [1]),  # drivers since R470
    ("MIG-45cc,MIG-c6d4", 2, [1, 1]),
    ("MIG-GPU-b3/7/0", 1, [3]),  # before
    ("MIG-dead", 1, []),
])  # fmt: skip
def test_the_gpus_of_the_ranks(visible, slots, ours):
    gpus = [{"index": n, "uuid": f"GPU-{letter}{n}", "bus": f"00000000:0{n}:00.0"} for n, letter in enumerate("aabb")]
    gpus[1]["instances"] = ["MIG-c6d4f1ef-42e4", "MIG-45cc1234-d72c"]
    assert of_gpus.used(gpus, visible, slots) == ours


def test_one_gpu_of_a_virtual_machine_needs_no_nvlink():
    answers = {"node1": facts("h100-sxm")}
    answers["node1"]["gpus"] = [answers["node1"]["gpus"][0] | {"nvlinks": [0] * 18}]
    answers["node1"]["peers"] = []
    assert levels(judged("gpu links", answers, slots=1)) == {"node1": {"green"}}


@pytest.mark.parametrize("threshold", [-2, 2, 0, 250])
def test_a_temperature_that_is_a_difference_is_no_threshold(threshold):
    answers = {"node1": facts("h100-sxm", {"slowdown_at": threshold})}
    assert levels(judged("gpu clocks", answers)) == {"node1": {"green"}}


@pytest.mark.parametrize(
    ("live", "level"), [([], "yellow"), ([{"index": 1, "xid": 95}], "red"), ([{"index": 2, "xid": 95}], "yellow")]
)
def test_uncorrected_errors_that_were_contained_are_a_warning(live, level):
    answers = {"node1": facts("h100-sxm", {"uncorrected": 1}) | {"xids": live}}
    assert levels(judged("gpu memory errors", answers)) == {"node1": {level}}


# ---- the probe ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_asks_for_all_figures(stand_in, kind):  # noqa: F811
    found = stand_in(KINDS[kind])
    wanted = facts(kind)
    assert found["gpus"] == wanted["gpus"]
    assert found["peers"] == wanted["peers"]


@pytest.mark.parametrize("figure", KINDS["h100-sxm"]["gpu"])
def test_a_figure_that_is_not_supported_is_left_out_alone(stand_in, figure):  # noqa: F811
    said = copy.deepcopy(KINDS["h100-sxm"])
    del said["gpu"][figure]
    assert [set(gpu) for gpu in stand_in(said)["gpus"]] == [{"index", *said["gpu"]}] * 8
    for row in ROWS:
        answers = {"node1": stand_in(said)}
        assert levels(judged(row, answers))["node1"] <= {"green"} | ({"yellow"} if figure == "nvlinks" else set())


def test_a_lost_gpu_leaves_the_others_their_figures(stand_in):  # noqa: F811
    found = stand_in(KINDS["rtx-4090"] | {"lost": [1]})
    assert found["gpus"][1] == {"index": 1, "lost": True}
    assert found["gpus"][0]["name"] == "NVIDIA GeForce RTX 4090"


def test_live_events_end_with_the_last_one(stand_in):  # noqa: F811
    assert stand_in(KINDS["rtx-4090"] | {"xids": [{"index": 1, "xid": 79}]})["xids"] == [{"index": 1, "xid": 79}]


def test_a_driver_that_fails_and_a_library_that_is_missing(stand_in, monkeypatch):  # noqa: F811
    assert stand_in({"problem": "Driver/library version mismatch"}) == {"problem": "Driver/library version mismatch"}
    monkeypatch.delenv("STAND_IN_NVML")
    found = probe.look()
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in found["absent"]
    (result,) = judged("gpus", {"node1": found}, 2, {"node1": 2})["node1"]
    assert result.level == "grey", "its GPUs can be used all the same"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probe.look() == {"absent": "nvidia-ml-py is not installed there"}


def test_the_installed_library_has_every_name_that_is_asked_for(monkeypatch):
    """The stand-in must have no name that NVIDIA's module lacks."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    there = pytest.importorskip("pynvml")
    text = (REPOSITORY / "brigade/check/probes/gpus.py").read_text()
    names = set(re.findall(r"\bnvml\.(\w+)", text)) - {"gpus"}
    assert len(names) > 25
    assert [name for name in sorted(names) if not hasattr(there, name)] == []


# ---- Xids ------------------------------------------------------------------------------------------------------------
def xids(*entries, live=(), own=None, slots=8):
    """own: figures of GPU 1; entries: bus, number, age, and the action of number 154"""
    said = facts("h100-sxm", own) | {"xids": list(live)}
    fields = ("bus", "xid", "age", "action")
    log = {"node1": {"xids": [dict(zip(fields, entry, strict=False)) for entry in entries]}}
    return judged("gpu Xid errors", {"node1": said}, slots, log=log)["node1"]


def test_an_xid_has_its_meaning_its_gpu_and_its_age():
    (result,) = xids(("0000:03:00", 79, 7300), ("0000:03:00", 79, 9000))
    assert (result.level, result.problem) == ("yellow", "GPU 3: Xid 79, 2 h ago: it has fallen off the PCIe bus")
    assert "ssh node1 sudo reboot" in result.cure


@pytest.mark.parametrize("own, xid, age, level", [
    ({}, 48, 60, "yellow"),
    ({}, 48, 90_000, "green"),
    ({}, 13, 60, "yellow"),
    ({}, 13, 90_000, "green"),
    ({}, 74, 60, "yellow"),
    ({}, 999, 1, "yellow"),
    ({}, 119, 60, "yellow"),
    ({"recovery": 0}, 119, 60, "yellow"),
    ({"recovery": 1}, 119, 60, "red"),
    ({"recovery": 3}, 119, 60, "yellow"),
    ({"remapped": {"pending": 1}}, 48, 60, "red"),
    ({"remapped": {"pending": 1}}, 119, 60, "yellow"),
])  # fmt: skip
def test_xids_of_the_log_count_less_when_they_are_old_and_are_red_where_nvml_confirms_them(own, xid, age, level):
    """A reset that cured the GPU leaves the log as it is."""
    found = xids(("0000:01:00", xid, age), own=own)
    assert {result.level for result in found} == {level}
    ago = "1 min ago" if age == 60 else ""  # seconds go by while it is judged
    assert level == "green" or found[0].problem.startswith(f"GPU 1: Xid {xid}, {ago}")


def test_a_recovery_that_the_driver_wants_now_and_one_that_is_over():
    (result,) = xids(own={"recovery": 2})
    assert (result.level, result.problem) == ("red", "GPU 1: Xid 154, now: the driver wants a reset of it, or a reboot")
    over = [("0000:01:00", 119, 900), ("0000:01:00", 154, 900, 1), ("0000:01:00", 154, 300, 0)]
    assert [result.level for result in xids(*over)] == ["green"]
    assert [result.problem[:14] for result in xids(*over, ("0000:01:00", 119, 100))] == ["GPU 1: Xid 119"]
    assert [result.level for result in xids(live=[{"index": 1, "xid": 154}])] == ["green"]  # it may be the end of it


def test_xids_of_gpus_that_are_not_ours():
    assert [result.level for result in xids(("0000:b1:00", 79, 60))] == ["green"]
    (result,) = xids(live=[{"index": 6, "xid": 95}], slots=4)
    assert (result.level, "not among this run's" in result.problem) == ("yellow", True)


def test_live_xids_and_a_log_that_may_not_be_read():
    (result,) = xids(live=[{"index": 2, "xid": 95}])
    assert result.problem.startswith("GPU 2: Xid 95, now: ")
    log = {"node1": {"unreadable": "/dev/kmsg: Operation not permitted"}}
    (result,) = judged("gpu Xid errors", {"node1": facts("h100-sxm")}, log=log)["node1"]
    assert (result.level, "Operation not permitted" in result.problem) == ("grey", True)


def test_xids_are_read_from_the_kernels_log(monkeypatch):
    over = "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
    lines = [
        (10.0, "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        (5.0, "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping"),
        (1.0, "usb 1-1: new device"),
        (0.0, f"NVRM: Xid (PCI:0000:3b:00): 154, {over}"),
    ]
    monkeypatch.setattr(probe, "_kernel_messages", lambda: iter(lines))
    assert probe.kernel_log() == {
        "xids": [
            {"bus": "0000:3b:00", "xid": 79, "age": 10},
            {"bus": "0000:10:1c", "xid": 63, "age": 5},
            {"bus": "0000:3b:00", "xid": 154, "age": 0, "action": 0},
        ]
    }

    def refused():
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(probe, "_kernel_messages", refused)
    monkeypatch.setattr(probe, "_journal", lambda: iter([]))
    assert probe.kernel_log() == {"unreadable": "/dev/kmsg: Operation not permitted"}
