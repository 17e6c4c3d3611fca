"""Look at hosts again and again: over lines to their agents, and at what ranks leave in the output directory.

Nothing is asked of a rank. A host's agent reads counters of its system, a few milliseconds of one processor at each look.
"""

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UserError
from ..hosts import Facts
from ..hosts.connection import Channel, transport
from ..hosts.usage import heartbeats
from ..train.host import files
from ..train.run import events, typed

KEPT = 90.0  # seconds of samples, of which rates are made
AGAIN = 10.0  # seconds before a host that is lost is tried again
PATIENCE = 15.0  # for a login and for an answer


@dataclass
class HostSeen:
    """samples: (when by our clock, hosts/usage.sample()), newest last; problem: why it does not answer now"""

    name: str
    samples: deque[tuple[float, Facts]] = field(default_factory=deque)
    problem: str = "connecting"

    def add(self, facts: Facts) -> None:
        """Facts of hosts/usage.py, of which only what has its type is kept: a host may say anything."""
        now, ranks, gpus = time.monotonic(), facts.get("ranks"), facts.get("gpus")
        facts = {"at": facts.get("at"), "host": typed.kept(facts.get("host"), typed.HOST)}
        if not typed.is_amount(facts["at"]):
            self.problem = "what it says of itself is nothing that Brigade says"
            return
        facts["ranks"] = {
            key: typed.kept(says, typed.HEARTBEAT) for key, says in typed.kept(ranks, {}).items() if key.isdecimal()
        }
        facts["gpus"] = [typed.kept(gpu, typed.GPU) for gpu in gpus] if isinstance(gpus, list) else []
        self.problem = ""
        self.samples.append((now, facts))
        while self.samples[0][0] < now - KEPT:
            self.samples.popleft()


class Watching:
    """hosts: by name; directory: the run's, None where only hosts are watched; read: what its files say, by rank; told: its
    events"""

    def __init__(self, hosts: list[str], directory: Path | None, every: float) -> None:
        self.hosts = {name: HostSeen(name) for name in hosts}
        self.directory, self.every = directory and directory.absolute(), every
        self.read: dict[str, Facts] = {}
        self.told: list[Facts] = []
        self._looked = directory is None  # at the files, once
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[Channel] = []

    async def begin(self) -> None:
        self._tasks = [asyncio.ensure_future(self._follow(host)) for host in self.hosts.values()]
        self._tasks.append(asyncio.ensure_future(self._read_files()))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def ready(self) -> bool:
        """Tell whether the files were read, and each host has answered twice, or cannot."""
        return self._looked and all(
            len(host.samples) > 1 or host.problem not in ("", "connecting") for host in self.hosts.values()
        )

    async def _follow(self, host: HostSeen) -> None:
        """Ask one host until this is cancelled."""
        line = transport(host.name, "slurm" if "SLURM_JOB_ID" in os.environ else "ssh")
        while True:
            channel = Channel(host.name, range(0), line, asyncio.Queue())
            self._channels = [line_before for line_before in self._channels if line_before.open] + [channel]
            try:
                await channel.connect(PATIENCE)
                while True:
                    answer = await channel.ask("usage", timeout=PATIENCE, directory=str(self.directory or ""))
                    host.add(answer["facts"])
                    await asyncio.sleep(self.every)
            except UserError as error:
                host.problem = error.problem
            channel.abandon()
            await asyncio.sleep(AGAIN)

    async def _read_files(self) -> None:
        """Read the output directory as it is seen from here, which tells of hosts that do not answer, too. In a thread: a file
        system may hang."""
        while self.directory:
            with suppress(OSError):
                self.read = await asyncio.to_thread(heartbeats, self.directory)
                self.told = await asyncio.to_thread(_newest, self.directory / events.FILE)
            self._looked = True
            await asyncio.sleep(self.every)


def _newest(path: Path, size: int = 2**18) -> list[Facts]:
    """The events at the end of a file that may be long: `size` bytes of it."""
    found = []
    with suppress(FileNotFoundError), files.opened(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        for line in file.read().splitlines():
            with suppress(ValueError):  # the first one is cut; the last one may be half written
                found.append(typed.kept(typed.loaded(line), typed.EVENT))
    return list(filter(None, found))
