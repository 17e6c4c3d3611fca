"""One command for all hosts: start each one's local launcher, watch, and stop everything when anything fails."""

import asyncio
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..errors.console import counted
from . import first_failure, launchers, rendezvous
from .agent import SILENCE
from .connection import Channel, transport
from .first_failure import Failure
from .job import Job
from .status_and_logs import Board

FAILED_GRACE, STOPPED_GRACE = 3.0, 10.0  # seconds between SIGTERM and SIGKILL: after a failure, when the user stops
SETTLE = 1.0  # seconds to listen on after a failure: its cause may come in after its effect
DESCRIPTORS, OTHERS = 4, 128  # open files for each host (three pipes, and a pidfd in newer Pythons), and for all else


@dataclass
class Options:
    """How to launch; None lets launch choose. start_timeout: seconds from the first rank's readiness to the last one's."""

    launcher: str
    environment: dict[str, str]
    directory: Path
    master_addr: str | None = None
    master_port: int | None = None
    start_timeout: float = 300.0


@dataclass
class Rank:
    """What is known of one rank. stage: "", "started", "waiting" (at the rendezvous), "joined"."""

    host: str
    stage: str = ""
    exit: int | None = None
    follows: bool = False
    told: bool = False


@dataclass
class Launch:
    """One launch, from the first connection to the last process's end."""

    job: Job
    options: Options
    board: Board
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    channels: list[Channel] = field(default_factory=list)
    ranks: dict[int, Rank] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)  # host -> exit code of its launcher
    reached_end: bool = False  # rank 0 says so
    succeeded: bool = False
    stop_signal: int = 0
    stopped_twice: bool = False
    stopping_since: float | None = None
    first_waiting: float | None = None
    started: float = 0.0

    async def run(self) -> int:
        """Returns the exit code: 0 when train.py reached its end, 2 for a user's mistake, 1 for any other failure, 128 +
        the signal that stopped this process. Raises UserError before anything is started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._stop_asked, number)
        first_rank = 0
        for host, slots in self.job.hosts.items():
            way = transport(host, self.options.launcher)
            self.channels.append(Channel(host, slots, first_rank, way, self.events))
            for rank in range(first_rank, first_rank + slots):
                self.ranks[rank] = Rank(host)
            first_rank += slots
        try:
            await self._interruptible(self._start())
            if not self.stop_signal:
                await self._watch()
            await self._stop(STOPPED_GRACE if self.stop_signal else FAILED_GRACE)
        finally:
            await asyncio.gather(*(channel.close() for channel in self.channels))
        return self._conclude()

    # ---- start -------------------------------------------------------------------------------------------------
    async def _interruptible(self, work: Any) -> None:
        """Do the work unless a signal comes first."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._signalled())
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not task.done():
            task.cancel()
        else:
            task.result()

    async def _signalled(self) -> None:
        while not self.stop_signal:
            await asyncio.sleep(0.1)

    async def _start(self) -> None:
        await rendezvous.connect(self.channels)
        environment = self.options.environment
        rendezvous.check_alike(self.channels, environment.get("CUDA_VISIBLE_DEVICES"))
        example = launchers.command(self.options.launcher, self.job, launchers.Place(0, "", 0))
        await rendezvous.check_files(self.channels, [example[0], str(Path.cwd()), str(self.job.settings.recipe_path)])
        way = await rendezvous.find_way(self.channels, self.options.master_addr, self.options.master_port)
        self.started = time.monotonic()
        run = secrets.token_hex(8)
        started = []
        for number, channel in enumerate(self.channels):
            interface, ranks = way.interfaces[channel.host], counted(channel.slots, "rank")
            names = ("GLOO_SOCKET_IFNAME",) if interface == "lo" else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            sockets = {name: interface for name in names if interface and name not in environment}
            place = launchers.Place(number, way.address, way.port)
            started.append(
                channel.ask(
                    "start",
                    run=run,
                    command=launchers.command(self.options.launcher, self.job, place),
                    cwd=str(Path.cwd()),
                    environment=environment | sockets,
                    files=launchers.files(self.options.launcher, self.job),
                )
            )
            self.board.set(
                channel.host,
                f"starting {ranks} by {self.options.launcher}, {interface or '?'} to {way.address}:{way.port}",
            )
        await asyncio.gather(*started)

    # ---- watch -------------------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """Until all hosts ended well, something failed, or a signal asks for the end."""
        while not self.stop_signal:
            await self._hear(timeout=0.25)
            now = time.monotonic()
            self._check_silence(now)
            self._check_start(now)
            real = [failure for failure in self.failures if failure.kind != "follows"]
            if (real and now > real[0].at + SETTLE) or (
                self.failures and now > self.failures[0].at + first_failure.RACE
            ):
                return
            if len(self.ended) == len(self.channels) and not self.failures:
                if not self.reached_end:
                    last = self.channels[0].host
                    text = "all ranks ended with 0, but train.py did not reach its end (no success.json)"
                    self.failures.append(Failure(now, "unfinished", last, 0, 0, text))
                return

    async def _hear(self, timeout: float) -> None:
        """Take in what has come, waiting up to `timeout` seconds for something."""
        try:
            async with asyncio.timeout(timeout):
                channel, message = await self.events.get()
        except TimeoutError:
            return
        while True:
            kind = message.pop("is")
            self._handlers[kind](channel, **message)
            if self.events.empty():
                return
            channel, message = self.events.get_nowait()

    @cached_property
    def _handlers(self) -> dict[str, Callable[..., None]]:
        return {
            "rank": self._rank,
            "launcher": self._launcher,
            "ended": self._ended,
            "leaving": self._leaving,
            "stopped": self._stopped,
            "bye": self._bye,
            "lost": self._lost,
        }

    def _rank(self, channel: Channel, rank: int, **what: Any) -> None:
        """Something of one rank: pid, out, stage, told, follows, marker or exit."""
        one, name = self.ranks[rank], self._log(rank)
        if "out" in what:
            self.board.keep(name, what["out"])
            if rank == 0:
                self.board.say(what["out"])
        if "pid" in what or "stage" in what:
            one.stage = what.get("stage", "started")
            if one.stage == "waiting" and self.first_waiting is None:
                self.first_waiting = time.monotonic()
            self._show(channel)
        self.reached_end |= rank == 0 and "marker" in what
        one.follows |= "follows" in what
        if "told" in what and not one.follows:
            one.told = True
            self._fail(Failure(time.monotonic(), "told", channel.host, rank, what.get("code"), what["told"]))
        if "exit" in what:
            one.exit = code = what["exit"]
            self._show(channel)
            if code and not one.told:
                kind = "follows" if one.follows else "signal" if code < 0 else "exit"
                text = "its watching process was killed" if "unwatched" in what else ""
                self._fail(Failure(time.monotonic(), kind, channel.host, rank, code, text))

    def _launcher(self, channel: Channel, out: str) -> None:
        self.board.keep(f"launcher-{channel.host}", out)

    def _ended(self, channel: Channel, code: int) -> None:
        """A host's launcher ended. That is no news after its ranks did; before, it is a failure of its own."""
        self.ended[channel.host] = code
        left = [rank for rank in self._ranks_of(channel) if self.ranks[rank].exit is None]
        program = Path(launchers.LAUNCHERS[self.options.launcher].program).name
        if left and not any(self.ranks[rank].stage for rank in left):
            text = f"{program} ended with exit code {code} and started no rank"
            self._fail(Failure(time.monotonic(), "launcher", channel.host, None, code, text))
        elif left:
            text = (
                f"{program} ended with exit code {code} while rank {', '.join(map(str, left))} went on: it was killed"
            )
            self._fail(Failure(time.monotonic(), "launcher", channel.host, None, code, text))
        elif code and not any(self.ranks[rank].exit for rank in self._ranks_of(channel)):
            text = f"{program} ended with exit code {code} after its ranks had ended well"
            self._fail(Failure(time.monotonic(), "launcher", channel.host, None, code, text))

    def _leaving(self, channel: Channel, why: str) -> None:
        """An agent stops its ranks without having been told to."""
        self._fail(Failure(time.monotonic(), "lost", channel.host, text=f"the host was lost: {why}"))

    def _stopped(self, channel: Channel) -> None:
        well = all(self.ranks[rank].exit == 0 for rank in self._ranks_of(channel))
        self.board.set(channel.host, "done" if well else "stopped")

    def _bye(self, channel: Channel) -> None:
        """The agent is about to end."""

    def _lost(self, channel: Channel, why: str) -> None:
        """The line to a host is gone: expected once it has stopped, else a failure."""
        if channel.stopped or channel.host in self.ended:
            return
        self.board.set(channel.host, f"lost: {why}")
        self.failures.append(Failure(time.monotonic(), "lost", channel.host, text=f"the host was lost: {why}"))

    def _fail(self, failure: Failure) -> None:
        """Keep a failure, unless it is our own doing."""
        ours = self.stopping_since is not None and failure.at > self.stopping_since
        if not ours:
            self.failures.append(failure)

    def _check_silence(self, now: float) -> None:
        for channel in self.channels:
            if channel.open and now - channel.heard > SILENCE:
                channel.abandon()
                self._lost(channel, f"nothing heard of it for {SILENCE:.0f} s (link cut, or switched off)")

    def _check_start(self, now: float) -> None:
        """Ranks that hang on their way to the rendezvous would keep all others waiting for ten minutes."""
        since = self.first_waiting or self.started
        late = [rank for rank, one in self.ranks.items() if one.stage in ("", "started") and one.exit is None]
        if self.failures or not late or now - since < self.options.start_timeout:
            return
        rank, host = late[0], self.ranks[late[0]].host
        for channel in self.channels:
            channel.tell("stacks", ranks=[late_one for late_one in late if self.ranks[late_one].host == channel.host])
        text = (
            f"rank {', '.join(map(str, late[:8]))} did not get to the rendezvous within {self.options.start_timeout:.0f} s "
            "(--start_timeout)"
        )
        self._fail(Failure(now, "hang", host, rank, text=text))

    # ---- stop --------------------------------------------------------------------------------------------------
    def _stop_asked(self, number: int) -> None:
        if self.stop_signal:  # the second time: at once
            self.stopped_twice = True
            for channel in self.channels:
                channel.tell("stop", grace=0)
        self.stop_signal = self.stop_signal or number
        self.stopping_since = self.stopping_since or time.monotonic()  # what ends from here on was ended by us

    async def _stop(self, grace: float) -> None:
        """Stop all ranks on all hosts; returns when every host that still answers has none left."""
        self.stopping_since = self.stopping_since or time.monotonic()
        if self.reached_end and self.channels[0].open:
            await self._check_marker()
        for channel in self.channels:
            channel.tell("stop", grace=grace)
        deadline = time.monotonic() + grace + SILENCE
        while any(channel.open and not channel.stopped for channel in self.channels) and time.monotonic() < deadline:
            if not self.started:  # nothing was
                return
            await self._hear(timeout=0.25)
            self._check_silence(time.monotonic())

    @property
    def _marker(self) -> Path:
        """Where this run's marker of success must lie, whatever a rank says."""
        return self.job.output_dir.absolute() / "success.json"

    async def _check_marker(self) -> None:
        first = self.channels[0]
        with suppress(UserError):  # no answer is no proof
            self.succeeded = (await first.ask("marker", timeout=5, path=str(self._marker)))["there"]
        if not self.succeeded:
            text = f"train.py said that it ended well, but {self._marker} is not there"
            self.failures.append(Failure(time.monotonic(), "unfinished", first.host, 0, 0, text))

    def _conclude(self) -> int:
        unsure = [channel.host for channel in self.channels if self.started and not channel.stopped]
        for host in unsure:
            self.board.say(
                f"{host} does not say whether its ranks have ended; they end by themselves within {SILENCE:.0f} s "
                "of losing the line",
                sys.stderr,
            )
        if self.succeeded:
            for failure in self.failures:  # a launcher's tear-down, say: the run is what counts
                self.board.say(f"after the run's end: {failure.in_words()}", sys.stderr)
            self.board.say(f"succeeded: {self._marker}; logs in {self.board.directory}", sys.stderr)
            return 0
        if self.failures:
            failure = first_failure.first(self.failures)
            self._tell(failure)
            return first_failure.exit_code(failure)
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            how = f"ended at once by the second {name}" if self.stopped_twice else f"stopped by {name}"
            self.board.say(f"{how}; the same command goes on from the newest checkpoint", sys.stderr)
        return 128 + self.stop_signal

    def _tell(self, failure: Failure) -> None:
        """The verdict: who failed first and how, its last lines, where the rest is."""
        name = self._log(failure.rank) if failure.rank is not None else f"launcher-{failure.host}"
        lines = first_failure.report(failure, self.board.tail(name), self.board.path(name))
        seconds, hosts = time.monotonic() - failure.at, counted(len(self.channels), "host")
        lines.append(
            f"all ranks on {hosts} stopped {seconds:.1f} s after that; logs of all ranks: {self.board.directory}"
        )
        self.board.say("\n".join(lines), sys.stderr)

    # ---- words -------------------------------------------------------------------------------------------------
    def _ranks_of(self, channel: Channel) -> range:
        return range(channel.first_rank, channel.first_rank + channel.slots)

    def _log(self, rank: int) -> str:
        return f"rank-{rank:0{len(str(len(self.ranks) - 1))}d}-{self.ranks[rank].host}"

    def _show(self, channel: Channel) -> None:
        ranks = [self.ranks[rank] for rank in self._ranks_of(channel)]
        ended = [one for one in ranks if one.exit is not None]
        if ended and all(one.exit == 0 for one in ended):
            words = f"{len(ended)} of {counted(channel.slots, 'rank')} ended well"
        elif ended:
            words = f"{sum(bool(one.exit) for one in ended)} of {counted(channel.slots, 'rank')} failed"
        elif all(one.stage == "joined" for one in ranks):
            words = f"running, {counted(channel.slots, 'rank')}"
        else:
            words = f"{sum(bool(one.stage) for one in ranks)} of {counted(channel.slots, 'rank')} started"
        self.board.set(channel.host, words)


def allow_open_files(hosts: int) -> None:
    """Raise this process's limit of open files as far as it may. Raises UserError when that is too low for the hosts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    enough_for = (most - OTHERS) // DESCRIPTORS
    if hosts > enough_for and most != resource.RLIM_INFINITY:
        needed = hosts * DESCRIPTORS + OTHERS
        problem = f"they need {needed} open files, and the hard limit here, {most}, is enough for {max(0, enough_for)}"
        cure = f"as root `ulimit -n {needed}`; for good: nofile in /etc/security/limits.conf, LimitNOFILE= of a service"
        raise UserError(counted(hosts, "host"), problem, cure)
