"""What check says of GPUs, from answers of NVML as NVIDIA documents them (tests/data/nvml/), and of cores, memory and limits."""

import asyncio
import copy
import errno
import os
import re
import subprocess
import sys
import time
from itertools import combinations

import pytest
import yaml

from brigade.check import gpus as of_gpus
from brigade.check.hosts import Recorded, Wanted
from brigade.check.probes import devices as probe
from brigade.check.probes import nvml
from brigade.check.registry import checks
from brigade.check.results import NotHere
from brigade.check.run import judge
from brigade.recipe.files import REPOSITORY

KINDS = {path.stem: yaml.safe_load(path.read_text()) for path in (REPOSITORY / "tests/data/nvml").glob("*.yaml")}
GPU_ROWS = ("gpus", "gpu memory errors", "gpu clocks", "gpu links", "gpu Xid errors")
STAND_IN = REPOSITORY / "testbed" / "stand_in" / "nvml"
BROKEN = [(kind, name) for kind, said in KINDS.items() for name in said["broken"]]


def facts(kind, own=None):
    """What probes/nvml.py answers of a host. own: figures of GPU 1 that differ"""
    said = KINDS[kind]
    gpus = [{"index": n, **copy.deepcopy(said["gpu"])} for n in range(said["count"])]
    for number, gpu in enumerate(gpus):
        gpu["bus"] = f"0000{gpu['bus'].format(number)}"
    gpus[1] |= own or {}
    peers = [[a, b, said["peers"]] for a, b in combinations(range(said["count"]), 2)]
    return {"gpus": gpus, "peers": peers, "xids": [], **{key: said[key] for key in ("nvswitches", "fabric_manager")}}


def judged(name, answers, slots=8, count=None, environment=None, log=None):
    """host -> results of one check. answers: host -> what NVML says; count: host -> what nvidia-smi lists"""
    hello = {host: {"gpus": len(said.get("gpus", [])) or slots} for host, said in answers.items()}
    for host, number in (count or {}).items():
        hello[host]["gpus"] = number
    logs = {host: {"xids": []} for host in answers} | (log or {})
    wanted = Wanted(dict.fromkeys(answers, slots), environment=environment or {})
    hosts = Recorded(wanted, {"nvml.gpus": answers, "devices.kernel_log": logs}, hello)
    check = next(check for check in checks() if check.name == name)
    found = {}
    for result in asyncio.run(judge(check, hosts)):
        found.setdefault(result.host, []).append(result)
    return found


def levels(found):
    return {host: {result.level for result in results} for host, results in found.items()}


# ---- GPUs --------------------------------------------------------------------------------------------------------
def test_the_kinds_that_matter_are_there():
    assert sorted(KINDS) == ["a100-sxm", "h100-sxm", "rtx-4090"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", GPU_ROWS)
def test_sound_gpus_are_sound(kind, row):
    """A consumer card too: it counts no errors, has no NVLink, and runs its PCIe link slowly while it idles."""
    found = judged(row, {f"node{n}": facts(kind) for n in (1, 2)}, slots=KINDS[kind]["count"])
    assert levels(found) == {"node1": {"green"}, "node2": {"green"}}, found


@pytest.mark.parametrize(("kind", "name"), BROKEN)
def test_a_broken_gpu_is_found_by_its_row_and_by_no_other(kind, name):
    broken = KINDS[kind]["broken"][name]
    answers = {f"node{n}": facts(kind) for n in (1, 2, 3)}
    answers["node2"] = facts(kind, broken["says"])
    if broken.get("only"):
        answers["node2"]["gpus"][1] = {"index": 1, **broken["says"]}
    for row in GPU_ROWS:
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


@pytest.mark.parametrize(
    ("count", "slots", "level", "says"),
    [
        (8, 8, "green", ""),
        (7, 8, "red", "slots=8 in the hostfile, but it has 7 GPUs"),
        (0, 8, "red", "slots=8 in the hostfile, but it has 0 GPUs"),
        (None, 8, "red", "nvidia-smi fails"),
        (8, 4, "yellow", "slots=4 in the hostfile, but it has 8 GPUs"),
    ],
)
def test_gpus_are_counted_against_the_slots(count, slots, level, says):
    found = judged(
        "gpus", {"node1": facts("h100-sxm"), "node2": facts("h100-sxm")}, slots, {"node2": count, "node1": slots}
    )
    assert found["node1"][0].level == "green"
    (result,) = found["node2"]
    assert result.level == level
    assert says in result.problem


def test_hidden_devices_do_not_count():
    hidden = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert levels(judged("gpus", {"node1": facts("h100-sxm")}, 4, environment=hidden)) == {"node1": {"green"}}
    assert levels(judged("gpus", {"node1": facts("h100-sxm")}, 8, environment=hidden)) == {"node1": {"red"}}


def test_without_gpus_one_row_says_so_and_the_others_are_left_out():
    answers, none = {"node1": {}, "node2": {}}, {"node1": 0, "node2": 0}
    assert levels(judged("gpus", answers, 1, none)) == {"node1": {"grey"}, "node2": {"grey"}}
    for row in GPU_ROWS[1:]:
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
    answers = {"node1": facts(kind), "node2": facts(kind, broken["says"])}
    if broken.get("only"):
        answers["node2"]["gpus"][1] = {"index": 1, **broken["says"]}
    first = judged(broken["row"], answers, 1, environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert levels(first)["node2"] <= {"yellow", "green"}  # of one GPU no NVLink is judged
    assert all("not among this run's" in one.problem for one in first["node2"] if one.level == "yellow")
    if kind != "rtx-4090":
        some = judged(broken["row"], answers, 4, environment={"CUDA_VISIBLE_DEVICES": "0,2,3,4"})
        assert levels(some)["node2"] == {"yellow"}
        assert "red" in levels(judged(broken["row"], answers, 2))["node2"]  # the first ones, without the variable


@pytest.mark.parametrize(
    ("visible", "slots", "ours"),
    [
        (None, 3, [0, 1, 2]),
        ("3, 1", 2, [3, 1]),
        ("3,1,0", 2, [3, 1]),
        ("GPU-b2,0", 2, [2, 0]),
        ("0000:03:00.0", 1, [3]),
        ("0,-1,2", 3, [0]),
        ("GPU-", 1, []),  # which one?
        ("", 1, []),
    ],
)
def test_the_gpus_of_the_ranks(visible, slots, ours):
    gpus = [{"index": n, "uuid": f"GPU-{letter}{n}", "bus": f"00000000:0{n}:00.0"} for n, letter in enumerate("aabb")]
    assert of_gpus.used(gpus, visible, slots) == ours


def test_one_gpu_of_a_virtual_machine_needs_no_nvlink():
    answers = {"node1": facts("h100-sxm")}
    answers["node1"]["gpus"] = [answers["node1"]["gpus"][0] | {"nvlinks": [0] * 18}]
    answers["node1"]["peers"] = []
    assert levels(judged("gpu links", answers, slots=1)) == {"node1": {"green"}}


@pytest.mark.parametrize("threshold", [-2, 2, 0, 250])
def test_a_temperature_that_is_a_difference_is_no_threshold(threshold):
    assert levels(judged("gpu clocks", {"node1": facts("h100-sxm", {"slowdown_at": threshold})})) == {
        "node1": {"green"}
    }


@pytest.mark.parametrize(
    ("live", "level"), [([], "yellow"), ([{"index": 1, "xid": 95}], "red"), ([{"index": 2, "xid": 95}], "yellow")]
)
def test_uncorrected_errors_that_were_contained_are_a_warning(live, level):
    answers = {"node1": facts("h100-sxm", {"uncorrected": 1}) | {"xids": live}}
    assert levels(judged("gpu memory errors", answers)) == {"node1": {level}}


# ---- Xid errors --------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("xid", "age", "level"),
    [
        (48, 60, "yellow"),
        (48, 90_000, "green"),
        (13, 60, "yellow"),
        (13, 90_000, "green"),
        (74, 60, "yellow"),
        (999, 1, "yellow"),
    ],
)
def test_old_xids_count_less(xid, age, level):
    assert [result.level for result in xids(("0000:01:00", xid, age))] == [level]


@pytest.mark.parametrize(
    ("own", "xid", "level"),
    [
        ({}, 119, "yellow"),
        ({"recovery": 0}, 119, "yellow"),
        ({"recovery": 1}, 119, "red"),
        ({"recovery": 3}, 119, "yellow"),
        ({"remapped": {"pending": 1}}, 48, "red"),
        ({"remapped": {"pending": 1}}, 119, "yellow"),
    ],
)
def test_xids_of_the_log_are_red_where_nvml_confirms_them(own, xid, level):
    """A reset that cured the GPU leaves the log as it is."""
    found = xids(("0000:01:00", xid, 60), own=own)
    assert {result.level for result in found} == {level}
    assert found[0].problem.startswith(f"GPU 1: Xid {xid}, 1 min ago")


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
    lines = [
        (10.0, "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        (5.0, "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping"),
        (1.0, "usb 1-1: new device"),
        (
            0.0,
            "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
        ),
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


# ---- the probe ---------------------------------------------------------------------------------------------------
@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """NVML as a file says it."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def answer(said):
        (tmp_path / "said.yaml").write_text(yaml.safe_dump(said))
        monkeypatch.setenv("STAND_IN_NVML", str(tmp_path / "said.yaml"))
        return nvml.gpus()

    yield answer
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_asks_for_all_figures(stand_in, kind):
    found = stand_in(KINDS[kind])
    wanted = facts(kind)
    assert found["gpus"] == wanted["gpus"]
    assert found["peers"] == wanted["peers"]


@pytest.mark.parametrize("figure", KINDS["h100-sxm"]["gpu"])
def test_a_figure_that_is_not_supported_is_left_out_alone(stand_in, figure):
    said = copy.deepcopy(KINDS["h100-sxm"])
    del said["gpu"][figure]
    assert [set(gpu) for gpu in stand_in(said)["gpus"]] == [{"index", *said["gpu"]}] * 8
    for row in GPU_ROWS:
        answers = {"node1": stand_in(said)}
        assert levels(judged(row, answers))["node1"] <= {"green"} | ({"yellow"} if figure == "nvlinks" else set())


def test_a_lost_gpu_leaves_the_others_their_figures(stand_in):
    found = stand_in(KINDS["rtx-4090"] | {"lost": [1]})
    assert found["gpus"][1] == {"index": 1, "lost": True}
    assert found["gpus"][0]["name"] == "NVIDIA GeForce RTX 4090"


def test_live_events_end_with_the_last_one(stand_in):
    assert stand_in(KINDS["rtx-4090"] | {"xids": [{"index": 1, "xid": 79}]})["xids"] == [{"index": 1, "xid": 79}]


def test_a_driver_that_fails_and_a_library_that_is_missing(stand_in, monkeypatch):
    assert stand_in({"problem": "Driver/library version mismatch"}) == {"problem": "Driver/library version mismatch"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.gpus() == {"absent": "nvidia-ml-py is not installed there"}


def test_the_installed_library_has_every_name_that_is_asked_for(monkeypatch):
    """The stand-in must have no name that NVIDIA's module lacks."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    there = pytest.importorskip("pynvml")
    text = (REPOSITORY / "brigade/check/probes/nvml.py").read_text()
    names = set(re.findall(r"\bnvml\.(\w+)", text)) - {"gpus"}
    assert len(names) > 25
    assert [name for name in sorted(names) if not hasattr(there, name)] == []


# ---- the host ----------------------------------------------------------------------------------------------------
HOST = {
    "cores": 32.0,
    "memory": {"total": 256 * 2**30, "available": 240 * 2**30},
    "shm": {"total": 128 * 2**30, "free": 128 * 2**30},
    "open_files": [1024, 524288],
    "locked_memory": None,
    "infiniband": ["mlx5_0"],
    "verbs": True,
    "ib_off": False,
}
HOST_ROWS = ("cores", "memory", "/dev/shm", "open files", "locked memory")


def of_host(name, own, slots=8, gpus=8, environment=None):
    wanted = Wanted({"node1": slots, "node2": slots}, environment=environment or {})
    answers = {"devices.host": {"node1": HOST, "node2": HOST | own}}
    check = next(check for check in checks() if check.name == name)
    hello = {host: {"gpus": gpus} for host in wanted.slots}
    return {result.host: result for result in asyncio.run(judge(check, Recorded(wanted, answers, hello)))}


@pytest.mark.parametrize("name", HOST_ROWS)
def test_a_usual_host_is_sound(name):
    assert {result.level for result in of_host(name, {}).values()} == {"green"}


@pytest.mark.parametrize(
    ("name", "own", "level", "says"),
    [
        ("cores", {"cores": 4.0}, "yellow", "8 ranks on 4 cores; they need 8 at least"),
        ("cores", {"cores": 16.0}, "yellow", "16 cores, the median host has 32"),
        (
            "memory",
            {"memory": {"total": 2**33, "available": 2**32}},
            "yellow",
            "4.0 of 8.0 GiB are free for 8 ranks, which need 8 GiB",
        ),
        (
            "memory",
            {"memory": {"total": 2**37, "available": 2**37}},
            "yellow",
            "128 GiB of memory, the median host has 256",
        ),
        ("memory", {"memory": {"total": 2**38, "available": 2**30}}, "red", "for 8 ranks, which need 4 GiB at least"),
        ("/dev/shm", {"shm": {"total": 2**26, "free": 2**26}}, "red", "0.06 of 0.06 GiB are free in /dev/shm"),
        ("/dev/shm", {"shm": {"total": 2**29, "free": 2**29}}, "yellow", "0.50 of 0.50 GiB"),
        ("/dev/shm", {"shm": None}, "grey", "no file system of its own"),
        ("open files", {"open_files": [256, 256]}, "yellow", "with a socket for each of 16 ranks it needs 528"),
        ("open files", {"open_files": [100, 100]}, "red", "a process may open 100 files there"),
        ("open files", {"open_files": [180, 524288]}, "green", ""),
        ("locked memory", {"locked_memory": 8 * 2**20}, "red", "a process may lock 8 MiB, and mlx5_0 need more"),
        ("locked memory", {"locked_memory": 8 * 2**20, "infiniband": []}, "green", ""),
        ("locked memory", {"locked_memory": 8 * 2**20, "verbs": False}, "green", ""),
        ("locked memory", {"locked_memory": 8 * 2**20, "ib_off": True}, "green", ""),
    ],
)
def test_a_host_that_lacks_something_is_named(name, own, level, says):
    found = of_host(name, own)
    assert found["node1"].level == "green"
    assert found["node2"].level == level
    assert says in found["node2"].problem
    assert level in ("green", "grey") or (found["node2"].why and found["node2"].cure)


def test_hosts_may_be_of_several_sizes():
    """Half the GPUs with half the memory, or with all of it."""
    whole, half = HOST["memory"], {"total": 2**37, "available": 2**37}
    check = next(check for check in checks() if check.name == "memory")
    for memory, slots in ((half, 4), (whole, 4), (whole, 8)):
        answers = {"devices.host": {"node1": HOST, "node2": HOST | {"memory": memory}}}
        found = asyncio.run(judge(check, Recorded(Wanted({"node1": 8, "node2": slots}), answers)))
        assert {result.level for result in found} == {"green"}


def test_what_docker_gives_is_enough_for_ranks_on_cpus_and_for_one_gpu():
    docker = {"shm": {"total": 2**26, "free": 2**26}}
    assert of_host("/dev/shm", docker, gpus=0)["node2"].level == "green"
    assert of_host("/dev/shm", docker, slots=1)["node2"].level == "green"
    assert of_host("/dev/shm", {"shm": {"total": 2**23, "free": 2**23}}, gpus=0)["node2"].level == "red"


def test_locked_memory_counts_where_nccl_would_use_infiniband():
    little = {"locked_memory": 8 * 2**20}
    assert of_host("locked memory", little, gpus=0)["node2"].level == "green"
    for off in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
        assert of_host("locked memory", little, environment=off)["node2"].level == "green"
    assert of_host("locked memory", little, environment={"NCCL_IB_DISABLE": "0"})["node2"].level == "red"


def test_many_ranks_need_a_hard_limit_alone():
    """28 hosts of 8 ranks with the limits of a usual login."""
    assert of_host("open files", {"open_files": [1024, 2**20]}, slots=14 * 8)["node2"].level == "green"


def test_ranks_inherit_the_hard_limit():
    code = """if True:
        import resource, sys
        from brigade.launch.agent import allow_open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
        allow_open_files()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "(200, 200)"


def test_this_host_answers():
    found = probe.host()
    assert 1 <= found["cores"] <= os.cpu_count()
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]


def control_groups(monkeypatch, files):
    """files: name -> what it says in each group, from the inside"""
    monkeypatch.setattr(
        probe, "_control_group", lambda controller, *names: zip(*(files.get(name, []) for name in names), strict=False)
    )


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": "MOST",
            "memory.current": "NOW",
            "memory.stat": "anon 100\nactive_file 600\ninactive_file 250\nslab_reclaimable 40",
        },
        {
            "memory.limit_in_bytes": "MOST",
            "memory.usage_in_bytes": "NOW",
            "memory.stat": "active_file 1\ninactive_file 2\ntotal_active_file 640\ntotal_inactive_file 250",
        },
    ],
)
def test_what_a_container_has_read_from_files_is_free(monkeypatch, files):
    """It looks full: the kernel keeps what was read until somebody wants the memory."""
    said = {name: [text.replace("MOST", str(2**20)).replace("NOW", str(2**20 - 10))] for name, text in files.items()}
    control_groups(monkeypatch, said)
    assert probe._memory() == {"total": 2**20, "available": 10 + 890}


def test_files_of_control_groups_are_read_together():
    for most, now in probe._control_group("memory", "memory.max", "memory.current"):
        assert most == "max" or most.isdigit()
        assert now.isdigit()


def test_control_groups_limit_cores_and_memory(monkeypatch):
    control_groups(
        monkeypatch,
        {
            "cpu.max": ["max 100000", "150000 100000"],
            "memory.max": ["max", str(2**20)],
            "memory.current": ["0", "1000"],
            "memory.stat": ["", "anon 900\nactive_file 0"],
        },
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert probe._cores() == 1.5
    assert probe._memory() == {"total": 2**20, "available": 2**20 - 1000}


# ---- one core's speed --------------------------------------------------------------------------------------------
class Timed(Recorded):
    """Hosts that answer the next of their times; `asked` has the hosts of each question."""

    def __init__(self, seconds, machines=None):
        hello = {host: {"machine": f"{(machines or {}).get(host, host)} net"} for host in seconds}
        super().__init__(Wanted(dict.fromkeys(seconds, 1)), {}, hello)
        self.seconds, self.asked = {host: list(times) for host, times in seconds.items()}, []

    async def ask(self, probe, seconds=10, each=None, **arguments):
        hosts = sorted(each or self.hello)
        self.asked.append(hosts)
        times = {host: self.seconds[host].pop(0) for host in hosts}
        return {host: {"seconds": took, "computing": min(took, 0.2)} for host, took in times.items()}


def speeds(seconds, machines=None):
    hosts = Timed(seconds, machines)
    check = next(check for check in checks() if check.name == "core speed")
    return hosts, {result.host: result for result in asyncio.run(judge(check, hosts))}


def test_a_host_half_as_fast_is_found_also_among_two():
    for count in (2, 3, 4):
        _, found = speeds({f"node{n}": [0.2, 0.2] for n in range(1, count)} | {"slow": [0.4, 0.41]})
        assert {host: result.level for host, result in found.items() if result.level != "green"} == {"slow": "red"}
    assert found["slow"].amount == 0.5
    assert "it waits" in found["slow"].cure


def test_a_host_that_was_disturbed_once_is_sound():
    hosts, found = speeds({"node1": [0.2], "node2": [0.2], "node3": [0.5, 0.2]})
    assert {result.level for result in found.values()} == {"green"}
    assert hosts.asked == [["node1", "node2", "node3"], ["node3"]]


def test_containers_of_one_machine_may_wait_for_one_another():
    """Here each computes for 0.2 s at most, however long it waits."""
    times = {"a": [0.2, 0.2], "b": [0.9, 0.9], "c": [0.2, 0.2]}
    assert {result.level for result in speeds(times, dict.fromkeys(times, "one"))[1].values()} == {"green"}
    assert speeds(times)[1]["b"].level == "red"


def test_arithmetic_takes_time():
    began = time.monotonic()
    found = probe.core_speed(1)
    assert 0 < found["computing"] <= found["seconds"] * 1.1
    assert found["seconds"] <= time.monotonic() - began
