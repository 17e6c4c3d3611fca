"""What check says of Xid errors: live ones by NVML, past ones from the kernel's log."""

import errno
import os

import pytest

from brigade.check.probes import gpus as probe
from testing.gpus import facts, judged


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


@pytest.mark.parametrize("xid, age, level", [
    (48, 60, "yellow"),
    (48, 90_000, "green"),
    (13, 60, "yellow"),
    (13, 90_000, "green"),
    (74, 60, "yellow"),
    (999, 1, "yellow"),
])  # fmt: skip
def test_old_xids_count_less(xid, age, level):
    assert [result.level for result in xids(("0000:01:00", xid, age))] == [level]


@pytest.mark.parametrize("own, xid, level", [
    ({}, 119, "yellow"),
    ({"recovery": 0}, 119, "yellow"),
    ({"recovery": 1}, 119, "red"),
    ({"recovery": 3}, 119, "yellow"),
    ({"remapped": {"pending": 1}}, 48, "red"),
    ({"remapped": {"pending": 1}}, 119, "yellow"),
])  # fmt: skip
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
