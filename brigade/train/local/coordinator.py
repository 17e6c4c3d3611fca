"""Where the replicas of an elastic run meet: who is there, and what each of them says to all others.

    python -m brigade.train.local.coordinator

reads {"replicas", "address", "port", "token", "patience", "start_timeout"} from stdin, says "port N", and ends when stdin ends.

It keeps nothing that the replicas do not also know: if it is killed and started again, it learns from them which of them belong
together and what was said last. Both sides send lines of JSON that prove who sent them (entrance.py):

    from a replica   hello (replica), what it is (runs, members, last), join, say (seq, payload, admits), leave (finished), beat
    to a replica     result (seq, members, said, joined), lost (replicas), refused (why, cure), beat

An exchange is complete when every member has said something under its number `seq`; then all get the same result. With `admits`,
those that wait to join are members from that result on. A replica that does not run what the members run (code, versions, recipe,
data, model) is refused.
"""

import asyncio
import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from ...errors import shown
from .entrance import FIRST, WAITING, Entrance, Line, Message

BEAT = 1.0  # seconds
BACK = 3.0  # seconds that a member whose line has broken may take to come back: who is killed does not
COMMIT = "commit"  # of what a replica runs
CURE = "give its host the same commit, packages and files; `launch --elastic` starts it again while the run goes on"


class Coordinator:
    """replicas: that the run may have; patience: seconds without a word of one; start_timeout: seconds that the first waits for
    the last at the start"""

    def __init__(self, replicas: int, token: str, patience: float, start_timeout: float) -> None:
        self.replicas, self.patience, self.start_timeout = replicas, patience, start_timeout
        self.entrance = Entrance(replicas, token)
        self.lines: dict[int, Line] = {}  # one of each
        self.heard: dict[int, float] = {}
        self.members: list[int] = []
        self.gone: dict[int, float] = {}  # members without a line -> until when they may come back
        self.said: dict[int, dict[str, Any]] = {}  # member -> what it said in the exchange that goes on
        self.joining: dict[int, Any] = {}  # who waits to belong to it -> what it said
        self.runs: dict[int, dict[str, Any]] = {}  # replica -> what it runs, {name: value}
        self.since = 0.0  # when the first of them came
        self.last: dict[str, Any] = {"seq": -1}  # result
        self.finished = False

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the line of one replica. A stranger's is closed."""
        line = None
        with suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            line = await self.entrance.admit(reader, writer)
            async with asyncio.timeout(self.patience):
                message = await line.read()
            self._greet(line.replica, message, line)
            while self.lines.get(line.replica) is line:
                self.heard[line.replica] = time.monotonic()
                self._take(line.replica, message)
                self.settle()
                message = await line.read()
        if line and self.lines.get(line.replica) is line:
            self._lose_line(line.replica, BACK)
            self.settle()
        writer.close()

    def _greet(self, replica: int, message: Message, line: Line) -> None:
        theirs = message.get("last") or {"seq": -1}
        left_behind = replica not in self.members or theirs["seq"] < self.last["seq"] - 1
        if message["members"] and left_behind and theirs["seq"] <= self.last["seq"]:
            # Its place may be another process's by now, whose line stays.
            line.write(json.dumps({"refused": "the others went on without it, as nothing was heard of it"}).encode())
            return
        before = self.lines.get(replica)
        if before and before is not line:
            before.close()
        self.lines[replica], self.runs[replica] = line, message.get("runs", {})
        self.gone.pop(replica, None)
        self.said.pop(replica, None)
        self.joining.pop(replica, None)
        if theirs["seq"] > self.last["seq"]:  # this coordinator is younger than the run
            self.last, self.members = theirs, [each for each in message["members"] if each not in self.joining]
            until = time.monotonic() + self.patience
            self.gone = {member: until for member in self.members if member not in self.lines}
        elif not message["members"] and replica in self.members:  # it died and has begun anew
            self._remove(replica)
            self._say_who_is_lost([replica])

    def _take(self, replica: int, message: Message) -> None:
        if "leave" in message:
            self.finished |= message["leave"]
            self._remove(replica)
            for each in [*self.joining] if self.finished else ():
                self._refuse_late(each)
        elif "join" in message:
            if self.finished:
                self._refuse_late(replica)
                return
            self.since = self.since if self.joining else time.monotonic()
            self.joining[replica] = message["join"]
        elif "seq" in message:
            if message["seq"] == self.last["seq"]:  # it has not got this result
                self._send(replica, {"result": self.last})
            else:
                self.said[replica] = message

    def _refuse_strangers(self) -> None:
        """Refuse those that wait to join and do not run what the members run, or, before any trains, what the first one runs."""
        known = [each for each in self.members or sorted(self.joining) if each in self.runs]
        for replica in [*self.joining] if known else ():
            first = known[0]
            different = difference(self.runs[replica], self.runs[first])
            if different:
                del self.joining[replica]
                why = f"it does not run what replica {first} runs: {different}"
                self._send(replica, {"refused": why, "cure": CURE})

    def _refuse_late(self, replica: int) -> None:
        self.joining.pop(replica, None)
        self._send(replica, {"refused": "the others have finished the run"})

    def settle(self) -> None:
        """Conclude whatever is complete by now."""
        now = time.monotonic()
        for replica in [each for each in self.lines if now - self.heard.get(each, now) > self.patience]:
            self.lines[replica].close()
            self._lose_line(replica, 0)
        lost = [member for member, until in self.gone.items() if now >= until]
        for member in lost:
            self._remove(member)
        if lost:
            self._say_who_is_lost(lost)
        if self.members:
            self._refuse_strangers()
        if self.members and all(member in self.said for member in self.members):
            admits = any(message.get("admits") for message in self.said.values())
            payloads = {member: self.said[member]["payload"] for member in self.members}
            self._conclude(self.said[self.members[0]]["seq"], payloads, admits)
        waited = now - self.since > self.start_timeout
        if not self.members and self.joining and (len(self.joining) == self.replicas or waited):
            self._refuse_strangers()
            self._conclude(0, {}, True)

    def _conclude(self, seq: int, said: dict[int, object], admits: bool) -> None:
        joined = dict(sorted(self.joining.items())) if admits else {}
        members = sorted({*self.members, *joined})
        self.last = {"seq": seq, "members": members, "said": said, "joined": joined}
        self.members, self.said = members, {}
        self.joining = {} if admits else self.joining
        for member in members:
            self._send(member, {"result": self.last})

    def _lose_line(self, replica: int, back: float) -> None:
        del self.lines[replica]
        self.joining.pop(replica, None)
        if replica in self.members:
            self.gone[replica] = time.monotonic() + back

    def _remove(self, replica: int) -> None:
        self.members = [member for member in self.members if member != replica]
        self.gone.pop(replica, None)
        self.said.pop(replica, None)

    def _say_who_is_lost(self, lost: list[int]) -> None:
        for member in self.members:
            self._send(member, {"lost": lost})

    def _send(self, replica: int, message: Message) -> None:
        line = self.lines.get(replica)
        if line:
            with suppress(OSError, RuntimeError):
                line.write(json.dumps(message).encode())

    async def tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(BEAT)
            paused, before = time.monotonic() - before > BACK, time.monotonic()
            if paused:  # this process, by Ctrl-Z for one: what the replicas said meanwhile has not been read yet
                self.heard = dict.fromkeys(self.heard, before)
            for replica in self.lines:
                self._send(replica, {"beat": 1})
            self.settle()


def difference(ours: Message, theirs: Message) -> str:
    """The first thing in which two replicas differ, in words; "": none. Commits are told, and not compared: files are."""
    names = [name for name in theirs | ours if name != COMMIT and ours.get(name) != theirs.get(name)]
    if not names:
        return ""
    commits = [runs.get(COMMIT) or "no commit" for runs in (ours, theirs)]
    at = f" (its clone is at {commits[0]}, the other's at {commits[1]})" if commits[0] != commits[1] else ""
    return f"{names[0]} is {shown(ours.get(names[0]))} here and {shown(theirs.get(names[0]))} there{at}"


def _say(_: asyncio.AbstractEventLoop, context: Message) -> None:
    """Say in a line what asyncio would print with a traceback: connections that cannot be accepted, as more files are open than
    this host allows, or whose other end was cut."""
    error = context.get("exception")
    print(f"coordinator: {context['message']}" + (f": {error}" if error else ""), file=sys.stderr, flush=True)


async def serve(replicas: int, port: int, token: str, patience: float, start_timeout: float, address: str = "") -> None:
    """address: where it listens, "" for all of this host's"""
    coordinator = Coordinator(replicas, token, patience, start_timeout)
    asyncio.get_running_loop().set_exception_handler(_say)
    both = socket.has_dualstack_ipv6() and not address
    family = socket.AF_INET6 if both else socket.AF_INET
    listening = socket.create_server((address, port), family=family, dualstack_ipv6=both)
    server = await asyncio.start_server(coordinator.meet, sock=listening, limit=FIRST, backlog=2 * WAITING)
    print(f"port {listening.getsockname()[1]}", flush=True)
    ticking = asyncio.ensure_future(coordinator.tick())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    ticking.cancel()
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(**json.loads(sys.stdin.readline())))
