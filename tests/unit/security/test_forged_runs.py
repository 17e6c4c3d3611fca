"""Only fields of the right type are read from a run's files, so that a stranger's run can be looked at safely."""

import json
import math
import os
import socket
from pathlib import Path

import pytest

from brigade.__main__ import main
from brigade.hosts import usage
from brigade.top import table
from brigade.top.watching import HostSeen, Watching
from brigade.train.run import events, status
from brigade.train.run.typed import ANSWER, DEEPEST, EVENT, HEARTBEAT, RUN, kept, loaded

HOST = socket.gethostname()
BEAT = {"rank": 0, "host": "elsewhere", "pid": 1, "step": 2, "phase": "forward", "seconds": 1.0}
EVIL = ["x", [], {}, None, True, -1, 10**400, math.nan, math.inf, [[1]], {"a": {}}]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "heartbeats").mkdir(parents=True)
    (folder / "run.yaml").write_text("{}")
    return folder


def nested(depth):
    return "[" * depth + "]" * depth


def test_only_fields_of_their_type_are_kept():
    assert kept({"step": 3, "loss": math.nan, "text": "x", "more": [1]}, EVENT).keys() == {
        "step",
        "loss",
        "text",
        "more",
    }
    for value in ("3", -1, True, 10**400, [3], None):
        assert kept({"step": value}, EVENT) == {}
    assert kept({"hosts": ["a", 1]}, EVENT) == {} and kept({"hosts": "ab"}, RUN) == {} and kept([1], RUN) == {}
    alias = []
    alias.append(alias)
    assert kept({"more": alias, "deep": loaded(nested(DEEPEST + 1)), 7: "x"}, EVENT) == {}


def test_a_document_without_end_is_no_document():
    with pytest.raises(ValueError, match="nested without end"):
        loaded(nested(100_000))


@pytest.mark.parametrize("key", [*BEAT, "waits", "tokens", "at"])
def test_top_shows_forged_heartbeats(key, run, prints, monkeypatch):
    from brigade.hosts import launches

    monkeypatch.setattr(launches, "hosts", set)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for number, value in enumerate(EVIL):
        (run / "heartbeats" / f"rank-{number}.json").write_text(json.dumps(BEAT | {"rank": number, key: value}))
    (run / "heartbeats" / "rank-99.json").write_text(json.dumps(BEAT | {"rank": 99}))
    (run / "heartbeats" / "rank-98.json").write_text(nested(100_000))
    (run / "events.jsonl").write_text("\n".join(json.dumps({"event": "slow", "rank": value}) for value in EVIL))
    assert "elsewhere" in prints(0, "top", str(run), "--once")
    assert all(type(says["rank"]) is int for says in usage.heartbeats(run).values())


def test_status_of_forged_events(run, capsys):
    lines = [{"event": "step", "time": value, "step": value, "steps": value, "loss": value} for value in EVIL]
    lines += [{"event": "grace", "seconds": value} for value in EVIL]
    (run / "events.jsonl").write_text("\n".join([*map(json.dumps, [*lines, *EVIL]), nested(100_000), "{"]))
    (run / "run.yaml").write_text(
        json.dumps({"run": {"strategy": "x", "hosts": {"a": 1}, "ranks": "9; id", "replicas": []}})
    )
    (run / "success.json").write_text("[]")
    assert main(["status", str(run)]) == 0 and main(["status", "--json", str(run)]) == 0
    known = status.of(run)
    assert (known["state"], known["problem"]) == ("ended", "success.json is not what was written")
    assert all(isinstance(line, dict) for line in events.read(run))
    assert status.ranks_of({"ranks": "9; id"}) == 0


@pytest.mark.parametrize("facts", [
    {}, {"at": "x", "host": {}}, {"at": 1.0, "host": []}, {"at": 1.0, "host": {"busy": []}},
    {"at": 1.0, "host": {"busy": 1.0, "joules": "x"}, "gpus": 7, "ranks": [1]}, {"at": 1.0, "host": {}, "gpus": [1, {"pids": 1}]},
    {"at": 1.0, "host": dict.fromkeys(("busy", "total", "received", "sent", "joules"), "x")},
    {"at": 1.0, "host": {}, "ranks": {"x": {}, "1": [], "2": {"step": "x", "waits": 3}, "3": BEAT | {"phase": 1}}},
], ids=str)  # fmt: skip
def test_a_host_that_says_nonsense_does_not_end_top(facts):
    from brigade.errors.console import console

    watching = Watching(["node1"], Path("run"), 1.0)
    for seconds in (0, 1):
        at = {"at": facts["at"] + seconds} if isinstance(facts.get("at"), float) else {}
        watching.hosts["node1"].add(facts | at)
    with Path(os.devnull).open("w") as nothing:
        console(file=nothing).print(table.render(watching))
    assert isinstance(watching.hosts["node1"], HostSeen)


def test_what_runs_write_is_kept_whole():
    assert kept(BEAT, HEARTBEAT) == BEAT
    waits = {"collective": "all_reduce", "number": 7, "group": "0", "more": [1]}
    assert kept(BEAT | {"waits": waits}, HEARTBEAT)["waits"] == waits
    answer = {"step": 3, "source": "", "question": "a book " * 50_000, "reference": "its end", "answer": "x" * 200_000}
    assert kept(answer, ANSWER) == answer
