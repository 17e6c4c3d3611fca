"""One run at a time in a directory: with locks, without them, and with a lock that a dead host left."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import time

import pytest

from brigade.train.run import other_owner, owner

OWNS = """
import socket, sys, time
from pathlib import Path
from brigade.train.run import owner
owner.BEAT = 0.1
socket.gethostname = lambda: sys.argv[2]
{prepare}
taken = owner.take(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(1000)
"""
NO_LOCKS = """
import errno, fcntl
def lockf(*_):
    raise OSError(errno.ENOLCK, "no locks")
owner.fcntl.lockf = lockf
"""


@pytest.fixture
def elsewhere(tmp_path):
    """elsewhere("node2"): a process that owns tmp_path, and takes itself to be on that host; None where it is refused."""
    started = []

    def start(host: str, prepare: str = "") -> subprocess.Popen | str:
        command = [sys.executable, "-c", OWNS.format(prepare=prepare), str(tmp_path), host]
        started.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        if started[-1].stdout.readline() == "taken\n":
            return started[-1]
        return started[-1].communicate()[1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(owner, "BEAT", 0.1)


@pytest.fixture
def impatient(monkeypatch):
    """From here on an owner that is not seen is dead at once."""
    return lambda: [monkeypatch.setattr(other_owner, name, 0.3) for name in ("DEAD", "DEAD_UNLOCKED")]


def without_locks(*_):
    raise OSError(errno.ENOLCK, "no locks")


def locked_by_a_dead_host(file, how):
    """What NFS does of a client that was switched off, for the file that it had."""
    file.seek(0)
    if file.read().startswith(b"node2 "):
        raise OSError(errno.EAGAIN, "locked")


@pytest.mark.parametrize("lock", [None, without_locks], ids=["locks", "no locks"])
def test_a_run_on_another_host_is_named_and_once_it_is_dead_taken_over(
    elsewhere, tmp_path, mistake, monkeypatch, impatient, lock
):
    first = elsewhere("node2", NO_LOCKS if lock else "")
    if lock:
        monkeypatch.setattr(fcntl, "lockf", lock)
    assert f"another run is using it: process {first.pid} on node2" in mistake(owner.take, tmp_path)
    first.kill()
    first.wait()
    impatient()
    mine = owner.take(tmp_path)
    assert other_owner.holder(tmp_path / owner.FILE) is None, (
        "asked from this process itself, which no lock of its own keeps out"
    )
    mine.release(tmp_path)
    assert not list(tmp_path.iterdir())


def test_whoever_looks_sees_the_owner_and_takes_nothing(elsewhere, tmp_path):
    assert other_owner.holder(tmp_path / owner.FILE) is None
    first = elsewhere("node2")
    assert other_owner.holder(tmp_path / owner.FILE) == {"host": "node2", "pid": first.pid}
    first.kill()
    first.wait()
    assert other_owner.holder(tmp_path / owner.FILE) is None


def test_the_lock_of_a_host_that_was_switched_off_is_taken_over(tmp_path, monkeypatch, capsys, impatient):
    impatient()
    (tmp_path / owner.FILE).write_text("node2 17 beats")
    monkeypatch.setattr(fcntl, "lockf", locked_by_a_dead_host)
    mine = owner.take(tmp_path)
    assert "no sign of process 17 on node2" in capsys.readouterr().err
    mine.release(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_process_of_the_same_number_in_another_container_is_seen(elsewhere, tmp_path, mistake, impatient):
    """Both are the first of theirs, and share the host's name."""
    number = os.getpid()
    first = elsewhere(socket.gethostname(), f"owner.os.getpid = lambda: {number}")
    assert f"another run is using it: process {number} on" in mistake(owner.take, tmp_path)
    first.kill()
    first.wait()
    owner.take(tmp_path).release(tmp_path)


def test_where_locks_stay_within_a_host_a_run_of_another_one_is_seen(elsewhere, tmp_path, mistake, monkeypatch):
    """NFS mounted with nolock: each host gets the lock."""
    elsewhere("node2")
    monkeypatch.setattr(fcntl, "lockf", lambda *_: None)
    assert "on node2" in mistake(owner.take, tmp_path)


def test_of_two_that_come_at_once_without_locks_one_stays(elsewhere, tmp_path, mistake, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", without_locks)

    def other_comes(_):
        (tmp_path / owner.FILE).write_text("node2 17 beats")

    monkeypatch.setattr(time, "sleep", other_comes)
    assert "process 17 on node2" in mistake(owner.take, tmp_path)


def test_who_was_taken_over_ends(elsewhere, tmp_path):
    first = elsewhere("node2")
    (tmp_path / owner.FILE).rename(tmp_path / "aside")
    (tmp_path / owner.FILE).write_text("node3 5 beats")
    assert first.wait(timeout=20) == 1 and "taken this directory over" in first.stderr.read()
