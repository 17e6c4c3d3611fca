"""The hosts themselves, over the lines that `launch` uses too (hosts/connection.py)."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from ..errors import UserError
from ..hosts import rendezvous
from ..hosts.connection import Channel, transport
from .hosts import Facts, Wanted

LOGIN = (
    60.0  # seconds for a login, an interpreter's start and its hello, in which a driver may wake up: as `launch` has
)
SPARE = 10.0  # seconds more for an answer than for what is asked, on a busy line


class Session:
    """Lines to all hosts. unreached: host -> why; hello: of the others; run: the name of every process that this starts there."""

    def __init__(self, wanted: Wanted, run: str, channels: Iterable[Channel] | None = None) -> None:
        self.wanted, self.run = wanted, run
        lines = ((host, range(slots), transport(host, wanted.launcher)) for host, slots in wanted.slots.items())
        given = [Channel(*line, asyncio.Queue()) for line in lines] if channels is None else channels
        self.channels = {channel.host: channel for channel in given}
        self.unreached: dict[str, str] = {}
        self._asked: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._holds = 0

    async def open(self) -> None:
        """Reach every host that can be reached."""
        try:
            await rendezvous.connect(list(self.channels.values()), LOGIN)
        except rendezvous.HostsFailed as error:
            self.unreached = error.problems
        except UserError as error:  # one host's own
            self.unreached = {error.place: error.problem}

    async def close(self) -> None:
        """Hang up. Each agent ends what it has started on its host."""
        for asked in self._asked.values():
            asked.cancel()
        await asyncio.gather(*(channel.close() for channel in self.channels.values()))

    @property
    def hello(self) -> dict[str, Facts]:
        return {host: channel.hello for host, channel in self.channels.items() if channel.open}

    def question(self, host: str, probe: str, arguments: Facts, seconds: float) -> "asyncio.Task[dict[str, Any]]":
        """The one answer to a question, however many checks ask it."""
        key = json.dumps([host, probe, arguments], sort_keys=True)
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self.order(host, probe, arguments, seconds))
        return self._asked[key]

    async def order(self, host: str, probe: str, arguments: Facts, seconds: float, hold: str = "") -> dict[str, Any]:
        what = {"run": self.run, "environment": dict(self.wanted.environment), "seconds": seconds, "hold": hold}
        try:
            return await self.channels[host].ask(
                "probe", timeout=seconds + SPARE, probe=f"check.probes.{probe}", arguments=arguments, **what
            )
        except UserError as error:
            return {"problem": error.problem}

    async def release(self, host: str, hold: str) -> None:
        with suppress(UserError):
            await self.channels[host].ask("release", hold=hold)

    def name_of_hold(self) -> str:
        self._holds += 1
        return str(self._holds)


class View:
    """The hosts as one check sees them: its own record of who did not answer. See hosts.Hosts."""

    def __init__(self, session: Session) -> None:
        self._session, self.wanted, self.hello = session, session.wanted, session.hello
        self.failed: dict[str, str] = {}

    async def ask(
        self, probe: str, seconds: float = 30, each: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> dict[str, Facts]:
        hosts = [host for host in self.hello if each is None or host in each]
        own = each or {}
        asked = [self._session.question(host, probe, arguments | own.get(host, {}), seconds) for host in hosts]
        return self._facts(hosts, await asyncio.gather(*map(asyncio.shield, asked)))

    @asynccontextmanager
    async def hold(
        self, probe: str, seconds: float = 30, each: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> AsyncIterator[dict[str, Facts]]:
        hosts, name = [host for host in self.hello if each is None or host in each], self._session.name_of_hold()
        own = each or {}
        order = self._session.order
        try:
            asked = (order(host, probe, arguments | own.get(host, {}), seconds, name) for host in hosts)
            yield self._facts(hosts, await asyncio.gather(*asked))
        finally:  # what a probe left for a moment has to be gone before anything else begins
            release = (self._session.release(host, name) for host in hosts)
            await asyncio.gather(*release)

    def _facts(self, hosts: list[str], answers: list[dict[str, Any]]) -> dict[str, Facts]:
        found = dict(zip(hosts, answers, strict=True))
        self.failed |= {host: answer["problem"] for host, answer in found.items() if "facts" not in answer}
        return {host: answer["facts"] for host, answer in found.items() if "facts" in answer}
