"""What a login meets before the agent speaks: start-up files of shells, and a way that loses packets."""

import asyncio
import gc
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from brigade.check.checks import Wanted
from brigade.check.run import Session, _login
from brigade.errors import UserError
from brigade.hosts import ssh
from brigade.hosts.connection import Channel

AGENT = f"{sys.executable} -m brigade.hosts.agent"
HELLO = '{"is":"hello","host":"x","machine":"x","versions":{},"project":"","gpus":0,"addresses":{}}'


def login(shell, then=lambda channel: None, patience=20):
    """Log in by this shell script, and hang up. Returns the channel, and the error that it raised."""
    channel, error = Channel("node2", range(1), ["sh", "-c", shell], asyncio.Queue()), None

    async def go():
        nonlocal error
        try:
            await channel.connect(patience)
            if AGENT in shell:
                await channel.ask("files", paths=[])
            then(channel)
        except UserError as caught:
            error = caught
        await channel.close()

    asyncio.run(go())
    return channel, error


def gone(pid):
    """Wait until a process has ended."""
    until = time.monotonic() + 5
    with suppress(FileNotFoundError):
        while (Path(f"/proc/{pid}/stat")).read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < until, f"process {pid} goes on"
            time.sleep(0.02)
    return True


@pytest.mark.parametrize("shell", [
    f"sleep 333 & echo $! > PID; exec {AGENT}",  # it holds the line open
    f"(sleep 333 & echo $! > PID); exec {AGENT}",  # nobody's child
    "sleep 333 & echo $! > PID; echo broken >&2; exit 1",
    "sleep 333 & echo $! > PID; echo hello; echo 'brigade> ['; exit 1",
    "sleep 333 & echo $! > PID; kill -9 $$",
])  # fmt: skip
def test_what_a_login_leaves_in_the_background_ends_with_the_line(shell, tmp_path, monkeypatch):
    """A line of ~/.bashrc, or a ProxyCommand. It held our pipes open: 5 s of waiting, a traceback of asyncio, and it went on."""
    ignored, pid = [], tmp_path / "pid"
    monkeypatch.setattr("brigade.hosts.connection.BEAT", 0.2)
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    began = time.monotonic()
    _, error = login(shell.replace("PID", str(pid)))
    gc.collect()
    assert time.monotonic() - began < 5 and gone(int(pid.read_text()))
    assert not ignored and (error is None) == (AGENT in shell)


@pytest.mark.parametrize("shell", ["exec bash", "exec sh", "exec cat", "echo Welcome; exec sh", "exec 2>&1; exec bash"])
def test_a_shell_that_takes_the_agents_place_is_named_at_once(shell):
    """`exec bash` in ~/.bashrc: what came from us were commands for it, and after 60 s "is it up"."""
    began = time.monotonic()
    _, error = login(shell)
    assert time.monotonic() - began < 5
    assert error.problem.startswith("a shell reads what is meant for the agent") and "`exec bash`" in error.cure


FORGED = [
    "brigade> hi",
    "brigade> ",
    "brigade> []",
    'brigade> {"is": "stopped"}',
    'brigade> {"is": "rank", "rank": 0, "exit": 0}',
    'brigade> {"is": "hello"}',
    "brigade> " + "[" * 5000,
]


@pytest.mark.parametrize("line", FORGED)
def test_a_line_of_a_start_up_file_that_looks_like_the_agents_is_no_fault_and_is_named(line):
    channel, error = login(f"echo '{line}'; echo 'brigade> {HELLO}'; read -r order")
    assert error is None and channel.hello["host"] == "x" and channel.events.empty() and not channel.stopped
    session = Session(Wanted({"node2": 1}), "run", [channel])
    said = _login(session, "node2")
    assert said.level == "yellow" and said.problem.endswith(f"{line.strip()[:80]!r}") and "~/.bashrc" in said.cure
    channel.forged = ""
    assert _login(session, "node2").level == "green"


def test_a_forged_hello_is_found_when_the_agent_says_its_own():
    def wait(channel):
        assert not channel.hello["project"]

    channel, error = login(f"echo 'brigade> {HELLO}'; exec {AGENT}", wait)
    said = error.problem if error else channel.events.get_nowait()[2]["why"]
    assert "'hello' twice: a start-up file prints one" in said


def test_what_a_host_said_is_quoted_when_it_did_not_answer():
    _, error = login("echo 'loading modules' >&2; sleep 333", patience=0.5)
    assert error.problem == "did not answer within 0 s; it said: loading modules"


@pytest.mark.parametrize("limit", ["-v 20000", "-d 10000"])
def test_a_limit_with_which_no_python_starts_is_named(limit):
    _, error = login(f"ulimit {limit}; exec {AGENT}")
    assert "`ssh node2 ulimit -a`" in error.cure, error


# ---- the way -------------------------------------------------------------------------------------------------------
@pytest.fixture
def sshd(monkeypatch):
    """A listening port in the place of a host's sshd."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        said = f"hostname 127.0.0.1\nport {listening.getsockname()[1]}\n"
        monkeypatch.setattr(ssh, "said", lambda *words: said)
        yield listening


def fault(**how):
    return asyncio.run(ssh.fault_on_the_way("node2", **how))


def test_a_way_without_fault_is_none(sshd, monkeypatch):
    def serve():  # as sshd: it reads a greeting, and hangs up on what is none
        with suppress(OSError):
            while True:
                connection = sshd.accept()[0]
                connection.recv(100)
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    assert fault() == fault(hopeless=True) == ""
    said = ssh.said()
    for by in ("proxyjump bastion", "proxycommand nc %h %p"):
        monkeypatch.setattr(ssh, "said", lambda *words, by=by: f"{said}{by}\n")
        monkeypatch.setattr(ssh, "_connect", None)  # nobody is asked: that is another host's port
        assert fault() == ""


def test_a_way_on_which_long_packets_are_lost_is_named_while_the_login_waits(sshd, monkeypatch):
    """As behind a tunnel with a smaller MTU that says nothing: ssh hangs in its exchange of keys. Here nobody reads, and little
    has room."""
    sshd.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    monkeypatch.setattr(ssh, "SECONDS", 0.3)
    said = fault(hopeless=True)
    assert said.startswith("long packets are lost on the way: its port")
    assert said.endswith("takes short ones, and not 8 KiB")
    assert fault() == said
    monkeypatch.setattr("brigade.hosts.connection.SLOW", 0.1)
    channel = Channel("node2", range(1), ["sh", "-c", "sleep 333"], asyncio.Queue())
    channel.transport[0] = "ssh"
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _as_sh(asyncio.create_subprocess_exec))
    with pytest.raises(UserError, match="long packets are lost on the way") as caught:
        asyncio.run(channel.connect(20))
    assert "mtu 1400" in caught.value.cure


def _as_sh(start):
    async def started(program, *words, **options):
        return await start("/bin/sh", *words, **options)

    return started


def test_lost_packets_are_named_before_a_host_is_said_to_be_down(sshd, monkeypatch):
    """A connection whose first packet was lost comes about a second later."""
    real, late = ssh._connect, iter([1.02, 0.0, 0.0, 3.1, 0.0, 1.0])

    async def slow(name, port):
        connection, seconds = await real(name, port)
        return connection, seconds + next(late)

    monkeypatch.setattr(ssh, "_connect", slow)
    assert fault().startswith("packets are lost on the way: 2 of 5 connections to its port")
    assert fault(hopeless=True) == "", "TCP gets through"


def test_of_a_host_that_is_down_ssh_itself_says_so(sshd):
    sshd.close()
    assert fault() == ""
