"""What check says of real GPUs, whose answers others published (tests/data/nvml/recorded/): sound ones and broken ones."""

import pytest
import yaml

from brigade.check.probes import gpus as probe
from testing.gpus import FOLDER, ROWS, judged, stand_in  # noqa: F401  a fixture

RECORDINGS = FOLDER / "recorded"
FILES = [path for path in sorted(RECORDINGS.glob("*.yaml")) if path.stem != "kernel_log"]
RECORDED = {f"{path.stem}: {name}": said for path in FILES for name, said in yaml.safe_load(path.read_text()).items()}
LOG = yaml.safe_load((RECORDINGS / "kernel_log.yaml").read_text())


def facts(said):
    """What probes/gpus.py answers of the host that was recorded."""
    own = said.get("own", {})
    gpus = [said.get("written", {}) | said["gpu"] | own.get(n, {}) | {"index": n} for n in range(said["count"])]
    return {"gpus": gpus, "peers": [], "xids": [], "nvswitches": 0, "fabric_manager": False}


def test_the_kinds_that_matter_are_there_sound_and_broken():
    for kind in ("A100", "H100", "GeForce"):
        of = [said for said in RECORDED.values() if kind in said["gpu"]["name"]]
        assert [said for said in of if "finds" in said]
        assert [said for said in of if "finds" not in said]
    assert all(said["source"] for said in RECORDED.values())


@pytest.mark.parametrize("name", RECORDED)
def test_a_real_gpu_is_judged_rightly(name):
    """Sound ones give no warning, and of a broken one this row says what is wrong and no other row says anything."""
    said = RECORDED[name]
    for row in ROWS:
        results = judged(row, {"node1": facts(said)}, slots=said["count"])["node1"]
        bad = [result for result in results if result.level != "green"]
        wanted = said.get("finds", {}).get(row, {})
        assert {(one.level, one.problem) for one in bad} == {
            (one.level, one.problem)
            for one in bad
            for gpu, (level, words) in wanted.items()
            if one.level == level and words in one.problem and str(gpu) in one.problem.partition(":")[0]
        }, row
        assert bool(bad) == bool(wanted), (row, bad)


@pytest.mark.parametrize("name", RECORDED)
def test_the_probe_reads_a_real_gpu(stand_in, name):  # noqa: F811
    said = RECORDED[name]
    gpu = said.get("written", {}) | {"bus": "0000:00:00.0"} | said["gpu"]
    found = stand_in({"count": said["count"], "gpu": gpu, "own": said.get("own", {})})["gpus"]
    wanted = [{"bus": gpu["bus"]} | one for one in facts(said)["gpus"]]
    assert found == [one | {"bus": f"0000{one['bus']}"} for one in wanted]


@pytest.mark.parametrize("entry", LOG, ids=lambda entry: entry["source"])
def test_real_lines_of_kernel_logs_are_read(monkeypatch, entry):
    monkeypatch.setattr(probe, "_kernel_messages", lambda: iter([(5.0, entry["text"].replace("\n", "\\x0a"))]))
    wanted = [entry["is"] | {"age": 5}] if entry["is"] else []
    assert probe.kernel_log() == {"xids": wanted}


def test_a_record_of_several_lines_ends_no_journal(monkeypatch):
    """As `journalctl --dmesg` prints what NVIDIA/NVSentinel issue 155 shows."""
    (fallen,) = [entry["text"] for entry in LOG if "155" in entry["source"]]
    indented = fallen.replace("\n", "\n" + " " * 36)
    said = f"1000.5 node kernel: {indented}\n1001.5 node kernel: NVRM: Xid (PCI:0000:10:1c): 63, pid=1896\n"

    def refused():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(probe, "_kernel_messages", refused)
    monkeypatch.setattr(probe.time, "time", lambda: 1010.5)
    monkeypatch.setattr(probe.subprocess, "run", lambda *words, **more: type("Done", (), {"stdout": said}))
    assert probe.kernel_log()["xids"] == [
        {"bus": "0000:b3:00.0", "xid": 79, "age": 10},
        {"bus": "0000:10:1c", "xid": 63, "age": 9},
    ]


def test_a_lost_gpu_is_told_when_it_fell_off_the_bus():
    """Its address is unknown then: it is that of the log which no other GPU has."""
    said = facts(RECORDED["geforce: eight RTX 4090"])
    said["gpus"][1] = {"index": 1, "lost": True}
    xids = [{"bus": "0000:25:00", "xid": 79, "age": 7200}, {"bus": "0000:01:00", "xid": 31, "age": 9e4}]
    (result,) = judged("gpu Xid errors", {"node1": said}, 8, log={"node1": {"xids": xids}})["node1"]
    assert (result.level, result.problem) == ("red", "GPU 1: Xid 79, 2 h ago: it has fallen off the PCIe bus")
    others = {"node1": {"xids": [{"bus": "0000:01:00", "xid": 79, "age": 60}]}}
    (result,) = judged("gpu Xid errors", {"node1": said}, 8, log=others)["node1"]
    assert (result.level, result.problem[:6]) == ("yellow", "GPU 0:")


def test_gpus_divided_by_mig_are_a_fault_where_ranks_share_a_host():
    said = facts(RECORDED["h100: eight"])
    for gpu in said["gpus"]:
        gpu["mig"] = True
    (result,) = judged("gpus", {"node1": said}, 8)["node1"]
    assert (result.level, result.problem) == ("red", "GPUs 0, 1, 2, 3, 4, 5, 6, 7: it is divided into instances (MIG)")


def test_a_hot_gpu_whose_driver_tells_only_how_far_it_is_from_the_limit():
    """The H100 that was recorded under load at 59 °C, 26 degrees from its limit, is now 23 degrees hotter."""
    said = facts(RECORDED["h100: one that somebody uses"])
    said["gpus"][0] |= {"temperature": 82, "margin": 3}
    (result,) = judged("gpu clocks", {"node1": said}, 1)["node1"]
    assert (result.level, result.problem) == ("yellow", "GPU 0: it has 82 °C and slows down at 85")
