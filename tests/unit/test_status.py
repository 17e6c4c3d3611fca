"""What a run's directory says of it to whoever looks from outside, and which launches are there in the background."""

import argparse
import json
import os
import socket
import subprocess
from types import SimpleNamespace

import pytest

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.hosts import launches
from brigade.launch import background, status
from brigade.train.run import events, other_owner


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    (directory / "checkpoint-4").mkdir(parents=True)
    (directory / "checkpoint-4/trainer_state.json").write_text("{}")
    run = "{ranks: 2, hosts: [node1, node2], strategy: {name: zero3}, started: today}"
    (directory / "run.yaml").write_text(f"run: {run}\n")
    events.add(directory, "started", step=0, steps=10, checkpoint=None)
    events.add(directory, "grace", step=2, seconds=33.4)
    events.add(directory, "step", step=5, loss=2.5)
    (directory / "events.jsonl").open("a").write('{"half a li')
    return directory


def said(capsys, *words):
    assert main(["status", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_run_that_goes_on_names_its_owner(run, capsys, monkeypatch):
    monkeypatch.setattr(other_owner, "holder", lambda path: {"host": "node1", "pid": 17})
    shown = said(capsys, run)
    assert "running (node1, process 17), step 5/10, loss 2.5000, checkpoint-4" in shown
    assert "2 ranks on node1, node2, zero3" in shown and "take up to 33 s" in shown
    assert "step: step 5, loss 2.5" in shown


@pytest.mark.parametrize("marker, words", [
    (None, "ended before its end"),
    ({"stopped.json": {"step": 5, "by": "SIGTERM", "time": "noon"}}, "stopped by SIGTERM at noon"),
    ({"success.json": {"steps": 10}}, "succeeded"),
])  # fmt: skip
def test_how_a_run_ended(run, capsys, marker, words):
    for name, content in (marker or {}).items():
        (run / name).write_text(json.dumps(content))
    assert f"{run}: {words}, step 5/10" in said(capsys, run)


def test_all_runs_of_the_usual_place_a_line_each_or_as_json(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert said(capsys) == "There is no run in outputs/.\n"
    run.parent.joinpath("outputs").mkdir()
    run.rename("outputs/tiny")
    assert said(capsys).count("\n") == 1
    known = json.loads(said(capsys, "--json"))
    assert (known["state"], known["step"], known["checkpoint"], known["owner"]) == ("ended", 5, "checkpoint-4", None)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2 and "there is no run.yaml" in capsys.readouterr().err


def test_nothing_is_written_where_there_is_no_run_any_more(tmp_path):
    """A file system that is unmounted in mid-run leaves an empty directory of the host's own disk."""
    events.add(tmp_path, "step", step=5)
    events.append(tmp_path / "bad_steps.jsonl", step=5)
    assert not [*tmp_path.iterdir()]


# ---- launches in the background --------------------------------------------------------------------------------------
@pytest.fixture
def record(tmp_path, own_cache):
    """call(pid, host): what a launch of `host` leaves in the cache once it has begun."""
    (tmp_path / "logs").mkdir()

    def write(pid, host=None):
        folder = tmp_path / "cache" / "launches"
        folder.mkdir(parents=True, exist_ok=True)
        born = launches.born(pid)
        kept = {"output": str(tmp_path / "run"), "logs": str(tmp_path / "logs"), "host": host or socket.gethostname()}
        (folder / f"{pid}.json").write_text(
            json.dumps(kept | {"pid": pid, "born": born, "started": "2026-01-01T00:00:00+0000"})
        )

    return write


def job(output):
    return SimpleNamespace(output_dir=output, hosts={"node1": 1}, texts=dict)


def test_a_record_that_is_none_is_passed_over(record, tmp_path):
    record(os.getpid())
    (tmp_path / "cache" / "launches" / "0.json").write_text("[]")
    assert [each["pid"] for each in launches.records()] == [os.getpid()]


def killed():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_a_second_launch_into_the_same_directory_is_refused_at_once(record, tmp_path):
    record(os.getpid())
    with pytest.raises(UserError, match="a launch is at work there already") as caught:
        background.run(lambda: 0, tmp_path / "other-logs", job(tmp_path / "run"), detach=False)
    assert f"touch {tmp_path / 'run'}/stop" in caught.value.cure
    assert background.find(tmp_path / "run")["pid"] == os.getpid()


def test_a_launch_that_was_killed_keeps_nobody_out_and_is_told(record, tmp_path, capsys):
    record(killed())
    assert background.follow(background.find(tmp_path / "run")) == 1
    assert "was killed" in capsys.readouterr().err
    assert background.run(lambda: 0, tmp_path / "logs", job(tmp_path / "run"), detach=False) == 0
    assert background.find(tmp_path / "run")["code"] == 0


def test_of_another_hosts_launch_it_is_told_where_to_ask(record, tmp_path, mistake):
    record(1, host="node9")
    assert "was started on node9" in mistake(lambda: background.follow(background.find(tmp_path / "run")))


def test_a_launch_on_its_way_to_the_first_step_is_starting(record, tmp_path, mistake):
    record(os.getpid())
    (tmp_path / "run").mkdir()
    assert "is starting" in mistake(lambda: status.run(argparse.Namespace(directories=[tmp_path / "run"], json=False)))


def test_of_many_ranks_the_first_ones_output_is_followed(record, tmp_path, capsys):
    """rank-07 matches rank-0*, too, and was shown where it had written last."""
    record(killed())
    logs = tmp_path / "logs"
    for number, name in enumerate(("rank-00-node1.log", "rank-07-node1.log", "rank-00-node1.first.log")):
        (logs / name).write_text(f"of {name}\n")
        os.utime(logs / name, (number, number))
    background.follow(background.find(tmp_path / "run"))
    assert capsys.readouterr().out == "of rank-00-node1.log\n"
