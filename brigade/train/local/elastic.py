"""Replicas of an elastic run (`launch --elastic`): each is a launch of its own; a coordinator connects them (coordinator.py).

Small messages go through the coordinator, weights directly between replicas over gloo. Rank i of a replica averages with rank i
of the others. When a replica is lost during a mean, the others compute that mean again without it.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UserError
from ..distributed import exchange, process_group, ranks
from ..distributed.exchange import T
from ..host.cluster import ELASTIC, World
from ..upstream import gloo
from . import entrance
from .entrance import GREETING, SAID, Message, longest
from .peers import Peers

TRY_AGAIN = 0.5  # seconds between two tries to reach the coordinator
BUILD = datetime.timedelta(seconds=60)  # for the connections of a group
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this host
CURE = "nothing to mend here: `launch --elastic` starts it again while the run goes on"


class Lost(RuntimeError):
    """A replica of the group went away in the middle of a transfer."""


class Line:
    """The connection of a replica's first rank to the coordinator. A broken one is made again, as long as the run may wait."""

    def __init__(self, world: World, where: Message, runs: Message) -> None:
        self.world, self.where, self.runs = world, where, runs
        self.news = threading.Condition()
        self.members: list[int] = []
        self.last: dict[str, Any] | None = None
        self.pending: dict[str, Any] | None = None  # what has been said and not been answered
        self.lost: set[int] = set()  # of the members, since the last result
        self.refused: UserError | None = None
        self.address = ""  # ours, as the others reach it
        self.socket: socket.socket | None = None
        self.seal: entrance.Seal | None = None  # of what is sent over it
        threading.Thread(target=self._serve, daemon=True).start()

    def say(self, message: Message) -> Message:
        """Say something, and return its result. Raise UserError where the others went on without this replica, where the
        coordinator stays away, and for a message that is too long."""
        with self.news:
            size = len(json.dumps(message))
            if size > SAID:
                self._refuse(
                    f"it has {size:,} bytes to say at once, of at most {SAID:,}", "train with fewer ranks a host"
                )
            self.pending = message
            self._send(message)
            while self.pending is not None and not self.refused:
                self.news.wait(1.0)
            if self.refused:
                raise self.refused
            assert self.last
            return self.last

    def leave(self, finished: bool) -> None:
        with self.news:
            self._send({"leave": finished})

    def _send(self, message: Message) -> None:
        if self.socket and self.seal:
            with suppress(OSError):  # whoever reads notices
                self.socket.sendall(self.seal.seal(json.dumps(message).encode()))

    def _serve(self) -> None:
        away, most = time.monotonic(), longest(self.world.replicas)
        while not self.refused:
            try:
                with self._connected() as line, line.makefile("rb") as lines:
                    seal = self._greet(line, lines)
                    while each := lines.readline(most):
                        message = json.loads(seal.open(each))
                        away = time.monotonic()  # whoever else answers there is no coordinator
                        self._hear(message)
            except (OSError, ValueError):
                pass
            self.socket = None
            if time.monotonic() - away > self.where["patience"] + self.where["start_timeout"]:
                self._refuse("its coordinator stays away")
            time.sleep(TRY_AGAIN)

    def _connected(self) -> socket.socket:
        for address in self.where["meet"]:
            with suppress(OSError):
                return socket.create_connection((address, self.where["port"]), timeout=GREETING)
        raise OSError("no address of the coordinator answers")

    def _greet(self, line: socket.socket, lines: BinaryIO) -> entrance.Seal:
        """Say hello; the seal by which the two know each other. lines: what is read from the line"""
        ours = entrance.nonce()
        line.sendall(ours)
        seal = entrance.Seal(self.where["token"], "replica", (lines.readline(len(ours)), ours))
        line.settimeout(self.where["patience"])
        with self.news:
            self.address = line.getsockname()[0].removeprefix("::ffff:")
            self.socket, self.seal = line, seal
            self._send({"hello": self.world.replica})
            self._send({"runs": self.runs, "members": self.members, "last": self.last})
            if self.pending:
                self._send(self.pending)
        return seal

    def _hear(self, message: Message) -> None:
        with self.news:
            if "beat" in message:
                self._send({"beat": 1})
            elif "refused" in message:
                self._refuse(message["refused"], message.get("cure", CURE))
            elif "lost" in message:
                self.lost |= set(message["lost"])
            elif self.pending is not None and self._is_ours(message["result"]):
                self.last, self.pending = message["result"], None
                self.members, self.lost = self.last["members"], set()
            self.news.notify_all()

    def _is_ours(self, result: Message) -> bool:
        assert self.pending is not None
        if "join" in self.pending:
            return str(self.world.replica) in result["joined"]
        return result["seq"] == self.pending["seq"]

    def _refuse(self, why: str, cure: str = CURE) -> None:
        with self.news:
            self.refused = self.refused or UserError(f"replica {self.world.replica}", why, cure)
            self.news.notify_all()


class ElasticPeers(Peers):
    """Peers that come and go: the ranks with this one's place in the replicas that are there, its own among them, in the order of
    replicas.

    runs: what all replicas must have alike, {name: value}
    """

    elastic = True

    def __init__(self, world: World, runs: Message) -> None:
        self.world, self.replica = world, world.replica
        self.line = Line(world, json.loads(os.environ[ELASTIC]), runs) if world.rank == 0 else None
        self.members: list[int] = []
        self.seq = 0
        self.built: list[int] = []  # the replicas that `groups` connect
        self.groups: list[Any] = []
        self.store: dist.TCPStore | None = None  # of the rank that has the line: the first replica's groups meet there
        self.address = ""

    def rejoin(self) -> None:
        self.groups = []

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.members)

    @property
    def speaks(self) -> bool:
        """Whether this replica is the one that saves and tells what all have in common."""
        return self.members[:1] == [self.replica]

    # ---- small things, over the coordinator ------------------------------------------------------------------------
    def join(self, about: Message) -> dict[int, Message]:
        """Wait until the others take this replica in. Return the `about` of each replica that joins at the same time, its own
        included: at the start of a run, of all. A collective."""
        result = self._say({"join": about})
        return {int(number): each for number, each in result["joined"].items()}

    def admit(self) -> list[int]:
        """Let in the replicas that wait to join, and return their numbers. A collective."""
        result = self._say({"payload": None, "admits": True})
        return [int(number) for number in result["joined"]]

    def gather(self, value: T) -> list[T]:
        """`value` of each that is there, on all ranks of them. exchange.py says what may be sent, and what is raised."""
        result = self._say({"payload": exchange.encode(ranks.gather(value)).decode()})
        payloads = sorted((int(number), payload) for number, payload in result["said"].items())
        of_ranks = [exchange.decode(payload, f"replica {number}") for number, payload in payloads]
        return [values[self.world.rank] for values in of_ranks]

    def leave(self, finished: bool) -> None:
        if self.line:
            self.line.leave(finished)

    def _say(self, message: Message) -> Message:
        answer: Any = None
        if self.line:
            try:
                answer = self.line.say(message if "join" in message else message | {"seq": self.seq + 1})
            except UserError as error:
                answer = {"refused": error.args}
        answer = ranks.gather(answer)[0]
        if "refused" in answer:
            raise UserError(*answer["refused"])
        self.seq, self.members = answer["seq"], answer["members"]
        return answer

    # ---- weights, over gloo ------------------------------------------------------------------------------------------
    def mean(self, values: Tensor, precision: str, background: bool = False) -> Tensor:
        """Return the mean as Peers.mean does, over those that are there when it is complete; again without those that are lost
        meanwhile."""
        while True:
            try:
                self.connect()
                mean_of_all = super().mean(values, precision) if self.count > 1 else values
                well = True
            except RuntimeError:  # Lost, or what gloo says of a broken connection
                mean_of_all, well = values, False
            if all(self.gather(all(ranks.gather(well)))):
                return mean_of_all
            self.built = []

    def send(self, to: int, data: bytes) -> None:
        """Send to the same rank of another replica, which receives. Raise RuntimeError where that is lost."""
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        there = self.built.index(to)
        self.wait(self.groups[0].send([torch.tensor([flat.numel()])], there, 0))
        self.wait(self.groups[0].send([flat], there, 1))

    def receive(self, of: int) -> bytes:
        """Return what another replica sends. Raise UserError where that cannot be, and RuntimeError where it is lost."""
        size, there = torch.zeros(1, dtype=torch.int64), self.built.index(of)
        self.wait(self.groups[0].recv([size], there, 0))
        if not 0 < int(size) <= MEMORY:
            raise exchange.refused(f"replica {of}", f"it announces {int(size):,} bytes, and this host has {MEMORY:,}")
        flat = torch.zeros(int(size), dtype=torch.uint8)
        self.wait(self.groups[0].recv([flat], there, 1))
        return flat.numpy().tobytes()

    def connect(self) -> None:
        """Make a group with all that are there. A collective. Raise RuntimeError where one of them is lost meanwhile."""
        host, port = self.gather(self._open_store())[0]
        if self.built == self.members:
            return
        self.built, self.groups = [], []
        if self.count > 1:
            store = dist.TCPStore(host, port, is_master=False, timeout=BUILD, wait_for_workers=False)
            prefix = dist.PrefixStore(f"{self.seq}-{self.world.rank}", store)
            place = self.members.index(self.replica)
            group = gloo.group(
                prefix, place, self.count, self.address, BUILD, transfers=process_group.COLLECTIVE_TIMEOUT
            )
            self.groups = [group]
        self.built = list(self.members)

    def _open_store(self) -> dist.Store:
        """(address, port) of this replica's store, in which groups are made."""
        place: Any = None
        if self.line:
            while not self.line.address:
                time.sleep(0.01)
            if not self.store:
                self.store = _store_at(self.line.address)
            place = self.line.address, self.store.port
        place = ranks.gather(place)[0]
        self.address = self.address or place[0]
        return place

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer. Raise Lost where the coordinator says meanwhile that somebody of the group is gone."""
        errors: list[BaseException] = []

        def wait() -> None:  # gloo's sends do not tell without it whether they are complete
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(1)
        while waiting.is_alive():
            if self._somebody_is_lost():
                raise Lost("a replica is gone")  # the thread ends with the group's connections
            waiting.join(1)
        if errors:
            raise errors[0]

    def _somebody_is_lost(self) -> bool:
        store, key = process_group.store_of_all(), f"brigade/lost-{self.seq}"
        if self.line and (self.line.lost or self.line.refused):
            store.set(key, "1")
            return True
        return bool(store.check([key]))


def _store_at(address: str) -> dist.TCPStore:
    """A store that listens only at this address of the host: torch's own socket listens at all."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    port = listening.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
