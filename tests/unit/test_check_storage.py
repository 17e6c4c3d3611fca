"""What check says of disks and clocks, from recorded facts; and what its probes do to a directory."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from brigade.check import storage
from brigade.check.checks import NotHere, Wanted
from brigade.check.probes import storage as probes
from brigade.hosts.job import make
from brigade.train.recipe.files import REPOSITORY
from testing.recorded_hosts import Recorded, by_host, results_of

HOSTS = {"node1": 1, "node2": 1, "node3": 1}
GIB = 2**30


def judged(name, answers, flags=(), recipe="recipes/tiny/full.yaml"):
    """host -> result of one check"""
    job = make(recipe, list(flags), None, dict(HOSTS))
    room = {"free": 900 * GIB, "size": 1000 * GIB, "missing": []}
    rooms = {"tmp": room | {"path": "/tmp"}, "cache": room | {"path": "/c"}, str(job.output_dir.absolute()): room}
    answers = {"storage.rooms": dict.fromkeys(HOSTS, rooms)} | answers
    return by_host(name, Recorded(Wanted(dict(HOSTS), job), answers))


def levels(found):
    return [found[host].level for host in HOSTS]


# ---- clocks ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset, level", [
    (0, "green"), (0.3, "green"), (0.8, "yellow"), (61, "red"), (-61, "red"), (86400 * 365, "red"),
])  # fmt: skip
def test_a_clock_that_is_off_is_named(offset, level):
    now = time.time()
    facts = {"node1": {"time": now}, "node2": {"time": now + offset}, "node3": {"time": now}}
    found = judged("clock", {"storage.clock": facts})
    assert levels(found) == ["green", level, "green"]
    assert found["node1"].value == "within 0.5 s"
    if offset in (61, -61):
        assert f"{'ahead of' if offset > 0 else 'behind'} the others'" in found["node2"].problem


@pytest.mark.parametrize("offset", [-61, 61])
@pytest.mark.parametrize("odd", ["node1", "node2"])
def test_of_two_hosts_the_one_that_is_not_like_ours_is_named(odd, offset):
    now = time.time()
    facts = {host: {"time": now + (offset if host == odd else 0)} for host in ("node1", "node2")}
    hosts = Recorded(Wanted({"node1": 1, "node2": 1}), {"storage.clock": facts})
    assert [result.host for result in results_of("clock", hosts) if result.level == "red"] == [odd]


def test_when_our_own_clock_is_off_no_host_is_blamed():
    facts = {host: {"time": time.time() - 5000} for host in HOSTS}
    assert levels(judged("clock", {"storage.clock": facts})) == ["green"] * 3


# ---- the output directory ----------------------------------------------------------------------------------------
def outputs(sees, **errors):
    left = {host: {"error": errors[host]} if host in errors else {} for host in HOSTS}
    return {"storage.note": left, "storage.notes": {host: {"seen": list(seen)} for host, seen in sees.items()}}


ALL, OWN = {host: list(HOSTS) for host in HOSTS}, {host: [host] for host in HOSTS}
ZERO = ["--ds_config", "ds_configs/zero3.json"]


def test_a_shared_directory_is_sound():
    found = judged("output directory", outputs(ALL), ZERO)
    assert levels(found) == ["green"] * 3
    assert found["node1"].value == "shared"


# The second host has a directory of its own, or the first one has.
OTHERS = {host: ["node1", "node3"] for host in ("node1", "node3")}
SECOND = OTHERS | {"node2": ["node2"]}
FIRST = {"node1": ["node1"], "node2": ["node2", "node3"], "node3": ["node2", "node3"]}


@pytest.mark.parametrize("sees, flags, errors, expected, says", [
    (OWN, [], {}, ["green", "green", "green"], "whole checkpoints"),  # DDP
    (OWN, ZERO, {}, ["green", "red", "red"], "zero3 writes a part of each checkpoint"),
    (SECOND, [], {}, ["green", "red", "green"], "is not what node1 sees there"),
    (SECOND, ZERO, {}, ["green", "red", "green"], "is not what node1 sees there"),
    (FIRST, ZERO, {}, ["red", "green", "green"], ""),
    (OTHERS, ZERO, {"node2": "Read-only file system"}, ["green", "red", "green"], "Read-only file system"),
], ids=["own, DDP", "own, ZeRO-3", "one odd, DDP", "one odd, ZeRO-3", "the first", "read-only"])  # fmt: skip
def test_an_output_directory_that_hosts_do_not_share_is_named(sees, flags, errors, expected, says):
    found = judged("output directory", outputs(sees, **errors), flags)
    assert levels(found) == expected
    assert says in f"{found['node2'].value} {found['node2'].problem} {found['node2'].why}"


def test_a_file_and_a_place_without_a_disk_are_named():
    answers = outputs(OTHERS, node2="File exists")
    answers["storage.note"]["node2"] |= {"file": "/etc/passwd", "size": 10}
    found = judged("output directory", answers)["node2"]
    assert (found.level, found.problem) == ("red", "/etc/passwd is a file, not a directory")
    answers["storage.note"]["node2"] |= {"file": "", "size": 0, "error": "No such file or directory"}
    assert "no disk is there" in judged("output directory", answers)["node2"].problem


def test_without_a_recipe_there_is_no_row():
    with pytest.raises(NotHere):
        results_of("output directory", Recorded(Wanted(dict(HOSTS)), {}))


# ---- room --------------------------------------------------------------------------------------------------------
def rooms(output=500 * GIB, recipe="recipes/tiny/full.yaml", flags=(), there=0, size=1000 * GIB, inodes=None, **others):
    """What is said of hosts of which the second has other rooms. others: bytes that are free for its "cache" or "tmp" """
    where = str(make(recipe, list(flags), None, dict(HOSTS)).output_dir.absolute())
    sound = {"tmp": 50 * GIB, "cache": 50 * GIB, where: 900 * GIB}
    odd = {"tmp": 50 * GIB, "cache": 50 * GIB, where: output} | others
    said = {"size": size, "missing": [], "checkpoints": there, "inodes": inodes}
    facts = {host: {name: {"free": free, "path": f"/its/{name}"} | said for name, free in of.items()}
             for host, of in {"node1": sound, "node2": odd, "node3": sound}.items()}  # fmt: skip
    return judged("room", {"storage.rooms": facts}, flags, recipe)


@pytest.mark.parametrize("disks, level, says", [
    ({}, "green", ""),
    ({"output": 0, "cache": 0, "tmp": 0, "size": 0}, "green", ""),  # without a size it is not judged
    ({"cache": GIB}, "yellow", "/its/cache has 1.0 GiB free"),
    ({"cache": 0}, "red", "/its/cache has 0.0 GiB"),
    ({"tmp": GIB // 1000}, "red", "/its/tmp has"),
    ({"output": GIB}, "yellow", "has 1.0 GiB free"),
    ({"output": GIB // 25}, "red", "a checkpoint of this recipe takes 0.03"),
])  # fmt: skip
def test_a_disk_without_room_is_named(disks, level, says):
    found = rooms(**disks)
    assert levels(found) == ["green", level, "green"]
    assert says.replace("0.03", "0.0") in found["node2"].problem


@pytest.mark.parametrize(("left", "level"), [(0, "red"), (5_000, "yellow"), (10**6, "green"), (None, "green")])
def test_a_disk_that_takes_no_more_files_is_named(left, level):
    found = rooms(inodes=left)["node2"]
    assert found.level == level
    assert level == "green" or (f"{left:,} more files (inodes)" in found.problem and "df -i" in found.cure)


@pytest.mark.parametrize("there, output, level", [
    (0, 200, "red"), (0, 300, "yellow"), (0, 600, "green"),
    (1, 90, "red"), (1, 200, "yellow"), (1, 330, "green"), (3, 110, "green"), (9, 110, "green"),
])  # fmt: skip
def test_the_room_that_is_needed_is_the_planners_and_a_checkpoint_that_lies_there_has_its_own(there, output, level):
    """Qwen3-8B in full: 8.19 B weights with AdamW's states, 107 GiB; two of them have to fit, and three stay. Where one is there
    the same command, started again, has to fit one more."""
    found = rooms(output=output * GIB, recipe="recipes/qwen3-8b/full-low-memory.yaml", there=there)
    assert levels(found)[1] == level
    assert found["node2"].value == ("enough" if level == "green" else f"{output}.0 GiB free")


def test_the_words_give_every_figure():
    found = rooms(output=200 * GIB, recipe="recipes/qwen3-8b/full-low-memory.yaml", there=1)["node2"].problem
    assert "and 1 of 4 that lie there at a time is there; room for 1 more (106.8 GiB) is the least" in found
    assert "for 3 more (320.4 GiB) enough" in found


def test_one_that_is_kept_alone_needs_one_more_when_it_goes_on():
    large = {"recipe": "recipes/qwen3-8b/full-low-memory.yaml", "flags": ["--save_total_limit", "1"]}
    assert levels(rooms(output=120 * GIB, there=1, **large))[1] == "green"
    assert levels(rooms(output=120 * GIB, **large))[1] == "red"


def test_the_same_recipe_needs_the_same_room_in_fp32():
    fp32, bf16 = (make("recipes/tiny/full.yaml", ["--bf16", flag], None, dict(HOSTS)) for flag in ("false", "true"))
    assert storage.checkpoint_bytes(fp32) == storage.checkpoint_bytes(bf16) > 1e7


# ---- rates -------------------------------------------------------------------------------------------------------
def rates(written, flags=(), recipe="recipes/tiny/full.yaml", **more):
    facts = {host: {"written": of, "read": 2 * of, "direct": True} for host, of in zip(HOSTS, written, strict=True)}
    return judged("write and read", {"storage.rate": facts | more}, flags, recipe)


@pytest.mark.parametrize("second, level", [(0.9e9, "green"), (0.4e9, "yellow"), (0.05e9, "red")])
def test_a_slow_disk_is_named(second, level):
    assert levels(rates([1e9, second, 1.1e9])) == ["green", level, "green"]


def test_the_seconds_of_a_checkpoint_count_all_hosts_where_all_write():
    """114.7 GB at 0.3 GB/s of each of three hosts under ZeRO-3."""
    found = rates([0.3e9] * 3, ZERO, "recipes/qwen3-8b/full-low-memory.yaml")
    assert "a checkpoint in 127" in found["node1"].value
    assert levels(rates([0.1e9] * 3, ZERO, "recipes/qwen3-8b/full-low-memory.yaml")) == ["yellow"] * 3


def test_a_disk_that_fails_is_named():
    found = rates([1e9] * 3, node2={"error": "Input/output error"})
    assert levels(found) == ["green", "red", "green"]


# ---- the probes --------------------------------------------------------------------------------------------------
def test_notes_are_seen_and_leave_nothing(tmp_path):
    where = str(tmp_path / "new" / "deep")
    missing = probes.room(where)["missing"]
    assert len(missing) == 2
    one, two = (probes.note(where, "token", host, missing) for host in ("a", "b"))
    assert "error" not in next(one) | next(two)
    assert sorted(probes.notes(where, "token", 2)["seen"]) == ["a", "b"]
    assert probes.notes(where, "another", 0)["seen"] == []
    one.close()  # the first that came is the first to go: the other's file is still there
    two.close()
    assert list(tmp_path.iterdir()) == []


def test_rooms_are_where_this_host_puts_things(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    for named, place in (("~/cache", tmp_path / "cache"), ("c", tmp_path / "start" / "c")):
        monkeypatch.setenv("BRIGADE_CACHE", named)
        found = probes.rooms([], str(tmp_path / "start"))
        assert [found[name]["path"] for name in ("cache", "tmp")] == [str(place), str(tmp_path / "scratch")]
    monkeypatch.delenv("BRIGADE_CACHE")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    found = probes.rooms([], "/")
    assert found["cache"]["path"] == str(tmp_path / ".cache" / "brigade")
    assert found["tmp"]["path"] != str(tmp_path / "nowhere")


def test_checkpoints_are_counted_and_files_on_the_way_are_named(tmp_path):
    for name in ("checkpoint-2", "checkpoint-40", "checkpoint-x", "other-3"):
        (tmp_path / name).mkdir()
    assert probes.room(str(tmp_path))["checkpoints"] == 2
    (tmp_path / "file").touch()
    note = probes.note(str(tmp_path / "file" / "run"), "token", "a", [])
    facts = next(note)
    note.close()
    assert facts["file"] == str(tmp_path / "file")
    assert facts["error"]
    assert probes.room("/proc/x")["size"] == 0


def test_a_rate_is_measured_and_leaves_nothing(tmp_path):
    facts = probes.rate(str(tmp_path / "new"), "token", "a", [str(tmp_path / "new")], 0.2, 2**23)
    assert facts["written"] > 0
    assert facts["read"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_is_ended_removes_what_it_made(tmp_path):
    """SIGTERM, as an agent sends it when nobody listens any more."""
    arguments = {"directory": str(tmp_path / "x"), "token": "t", "host": "a", "missing": [str(tmp_path / "x")]}
    order = json.dumps({"probe": "check.probes.storage.note", "arguments": arguments}) + "\n"
    command = [sys.executable, "-m", "brigade.hosts.probe"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **pipes) as process:
        process.stdin.write(order)
        process.stdin.flush()
        assert "free" in process.stdout.readline()
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found, level, says", [
    ({"path": "/var/tmp", "passed_by": "/tmp"}, "yellow", "/tmp is not there, or cannot be written; Python takes /var/tmp"),
    ({"path": "", "passed_by": "/scratch"}, "red", "/scratch is not there, or cannot be written"),
    ({"path": "/tmp", "passed_by": ""}, "green", ""),
])  # fmt: skip
def test_a_directory_for_temporary_files_that_cannot_be_written_is_named(found, level, says):
    disk = {"free": 2**40, "size": 2**41, "inodes": None}
    facts = {"node1": {"tmp": disk | found, "cache": disk | {"path": "/c"}}}
    (said,) = results_of("room", Recorded(Wanted({"node1": 1}), {"storage.rooms": facts}))
    assert (said.level, said.problem) == (level, says)


def test_which_directory_is_passed_by(monkeypatch, tmp_path):
    usable = set()
    monkeypatch.setattr(probes.os, "access", lambda path, mode: str(path) in usable)
    monkeypatch.setattr(probes.tempfile, "gettempdir", lambda: "/var/tmp")
    for name in ("TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    for named, writable, expected in (
        ("", ["/tmp"], ("/tmp", "")),
        ("", [], ("/var/tmp", "/tmp")),
        (str(tmp_path), [str(tmp_path), "/tmp"], (str(tmp_path), "")),
        (str(tmp_path), ["/tmp"], ("/tmp", str(tmp_path))),
        ("/nowhere", ["/nowhere", "/tmp"], ("/tmp", "/nowhere")),
    ):
        usable.clear()
        usable.update(writable)
        monkeypatch.setenv("TMPDIR", named)
        assert probes._tmp() == expected
