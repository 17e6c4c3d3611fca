"""Launches in the background: which of them are there, and what is said of one that was killed or is another host's."""

import argparse
import json
import os
import socket
import subprocess
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.hosts import launches
from brigade.launch import background, status


@pytest.fixture
def record(tmp_path, monkeypatch):
    """call(pid, host): what a launch of `host` leaves in the cache once it has begun."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
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
