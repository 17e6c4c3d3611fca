"""Strangers at the coordinator of an elastic run: they neither silence it, nor take its memory, nor speak for a replica."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from brigade.train.host.cluster import World
from brigade.train.local import elastic, entrance

TOKEN, FILES = "of this run", 256  # that it may open, as on hosts with a low limit


class Replica:
    """A connection of a replica, or of somebody who would like to be one."""

    def __init__(self, port, number=0, token=TOKEN):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.lines = self.socket.makefile("rb")
        ours, self.theirs = entrance.nonce(), self.lines.readline()
        self.socket.sendall(ours)
        self.seal = entrance.Seal(token, "replica", (self.theirs, ours))
        self.say({"hello": number})
        with contextlib.suppress(ConnectionError):  # whoever is not believed may have been cut off by now
            self.say({"runs": {}, "members": [], "last": None})

    def say(self, what):
        line = self.seal.seal(json.dumps(what).encode())
        self.socket.sendall(line)
        return line

    def hear(self, kind):
        """The next of this kind; None where the line ends."""
        try:
            while line := self.lines.readline():
                if kind in (what := json.loads(self.seal.open(line))):
                    return what[kind]
        except ConnectionResetError:
            return None

    def rest(self):
        """All bytes until the coordinator ends the connection, however it ends it."""
        try:
            return self.lines.read()
        except ConnectionResetError:
            return b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lines.close()
        self.socket.close()


@pytest.fixture(scope="module")
def coordinator():
    """(its port, its process): of one replica, whose patience is a minute."""
    process = subprocess.Popen(
        [sys.executable, "-m", "brigade.train.local.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
    )
    asked = {"replicas": 1, "address": "127.0.0.1", "port": 0, "token": TOKEN, "patience": 60, "start_timeout": 60}
    process.stdin.write(json.dumps(asked).encode() + b"\n")
    process.stdin.flush()
    yield int(process.stdout.readline().split()[1]), process
    process.kill()
    process.communicate()


def begins(port):
    """Whether a run can begin here."""
    with Replica(port) as replica:
        replica.say({"join": {"step": 0}})
        return replica.hear("result")["members"] == [0]


def stranger(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def test_idle_connections_do_not_silence_it(coordinator):
    port, process = coordinator
    with ExitStack() as open_ones:
        for _ in range(306):
            open_ones.enter_context(stranger(port))
        began = time.monotonic()
        assert begins(port) and time.monotonic() - began < entrance.GREETING
        assert len([*Path(f"/proc/{process.pid}/fd").iterdir()]) <= entrance.WAITING + 10


@pytest.mark.skipif(sys.platform != "linux", reason="only there all of 127.0.0.0/8 is this host")
def test_who_floods_it_drops_his_own(coordinator):
    port, _ = coordinator
    with ExitStack() as open_ones:
        with stranger(port) as honest, honest.makefile("rb") as lines:
            assert lines.readline()
            for _ in range(2 * entrance.WAITING):
                flood = socket.create_connection(("127.0.0.1", port), 20, source_address=("127.0.0.2", 0))
                open_ones.enter_context(flood)
            honest.settimeout(0.2)
            with pytest.raises(TimeoutError):  # it is still there
                honest.recv(1)


def test_lines_without_an_end_take_no_memory(coordinator):
    port, process = coordinator
    with ExitStack() as open_ones:
        for _ in range(40):
            line = open_ones.enter_context(stranger(port))
            try:
                for _ in range(16):
                    line.sendall(b"0" * 2**20)
            except OSError:  # it was closed meanwhile
                pass
        peak = next(row for row in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in row)
        assert int(peak.split()[1]) < 100 * 1024, peak
        assert begins(port)


def test_who_says_no_hello_is_closed(coordinator):
    line = stranger(coordinator[0])
    line.settimeout(2 * entrance.GREETING)
    line.sendall(b"0" * 2 * entrance.FIRST)
    with line, line.makefile("rb") as lines:
        lines.readline()
        with suppress(ConnectionResetError):
            assert lines.readline() == b""


@pytest.mark.slow
def test_who_is_silent_is_closed(coordinator):
    with stranger(coordinator[0]) as line, line.makefile("rb") as lines:
        began = time.monotonic()
        assert lines.readline() and lines.readline() == b""
        assert time.monotonic() - began < 2 * entrance.GREETING


@pytest.mark.parametrize("wrong", [{"token": ""}, {"token": "of another run"}, {"number": 1}])
def test_who_has_another_token_or_no_replicas_number_says_nothing_and_learns_nothing(coordinator, wrong):
    with Replica(coordinator[0], **wrong) as other:
        assert other.rest() == b""


def test_a_line_that_is_said_again_ends_its_connection(coordinator):
    with Replica(coordinator[0]) as replica:
        replica.say({"join": {"step": 0}})
        assert replica.hear("result")["seq"] == 0
        line = replica.say({"seq": 1, "payload": "1"})
        assert replica.hear("result")["said"] == {"0": "1"}
        replica.socket.sendall(line)
        assert replica.hear("result") is None


def test_a_line_of_another_connection_is_none_of_this(coordinator):
    """Whoever heard all of it can say it again, but not on a line of his own."""
    port, _ = coordinator
    heard = entrance.nonce()
    with stranger(port) as own, own.makefile("rb") as lines, Replica(port) as replica:
        lines.readline()
        seal = entrance.Seal(TOKEN, "replica", (replica.theirs, heard))
        own.sendall(heard + seal.seal(b'{"hello": 0}') + seal.seal(b'{"runs": {}, "members": [], "last": null}'))
        assert lines.readline() == b""


def test_the_token_is_never_sent():
    seals = [entrance.Seal(TOKEN, side, (nonce := entrance.nonce(), nonce)) for side in entrance.SIDES]
    assert TOKEN.encode() not in b"".join(seal.seal(b"{}") for seal in seals)


def test_each_side_opens_the_other_s_lines_in_their_order_and_none_of_its_own():
    nonces = entrance.nonce(), entrance.nonce()
    ours, theirs = (entrance.Seal(TOKEN, side, nonces) for side in entrance.SIDES)
    first, second = ours.seal(b"1"), ours.seal(b"2")
    for line in (second, first[:-1], first.replace(b"1\n", b"3\n"), b"\n", b""):
        with pytest.raises(ValueError):
            theirs.open(line)
    assert [theirs.open(first), theirs.open(second)] == [b"1", b"2"]
    with pytest.raises(ValueError):
        ours.open(theirs.seal(b"")[:-1] + b"\n\n")
    with pytest.raises(ValueError):
        entrance.Seal(TOKEN, "replica", (b"\n", b"\n")).open(entrance.Seal(TOKEN, "replica", nonces).seal(b"1"))


@pytest.mark.parametrize("says", [b"", b"{}\n", b"0" * 64 + b"\n" + b"0" * 64 + b' {"refused": "by a stranger"}\n'])
def test_who_takes_the_coordinator_s_place_tells_a_replica_nothing(says, monkeypatch):
    monkeypatch.setattr(elastic, "TRY_AGAIN", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as place:
        where = {"meet": ["127.0.0.1"], "port": place.getsockname()[1], "token": TOKEN}
        world = World(0, 0, 1, 1, "here", "launch", replicas=1)
        line = elastic.Line(world, where | {"patience": 0.1, "start_timeout": 0.1}, {})
        for _ in range(2):
            answered, _ = place.accept()
            with answered:
                answered.sendall(says)
                assert TOKEN.encode() not in answered.recv(2**16)
    with pytest.raises(elastic.UserError, match="its coordinator stays away"):
        line.say({"join": {}})


def test_a_replica_does_not_say_more_than_the_coordinator_takes(coordinator):
    world = World(0, 0, 1, 1, "here", "launch", replicas=1)
    where = {"meet": ["127.0.0.1"], "port": coordinator[0], "token": TOKEN, "patience": 60, "start_timeout": 60}
    line = elastic.Line(world, where, {})
    assert line.say({"join": {"step": 0}})["members"] == [0]
    most = "a" * (entrance.SAID - 100)
    assert line.say({"seq": 1, "payload": most})["said"] == {"0": most}
    with pytest.raises(elastic.UserError, match="to say at once"):
        line.say({"seq": 2, "payload": "a" * entrance.SAID})
