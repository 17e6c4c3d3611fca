"""One command for all hosts: start each one's local launcher, watch, and stop everything when anything fails.

Who does what: rendezvous.py meets the hosts, each host's agent.py runs its ranks, judge.py judges what they tell.
"""

import asyncio
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..errors.console import counted
from ..errors.tables import Fields
from ..hosts import rendezvous
from ..hosts.connection import Channel, News, transport
from ..hosts.hearing import SILENCE
from ..hosts.job import Job
from ..train.distributed import stop
from ..train.recipe.files import LAUNCHED, launched_texts
from . import first_failure, launchers
from .first_failure import Failure
from .judge import UPLOAD, Judge
from .status_and_logs import LIMIT, Output

FAILED_GRACE, STOPPED_GRACE = 3.0, 10.0  # seconds between SIGTERM and SIGKILL: after a failure, when the user stops
TRY_LATER = 75  # EX_TEMPFAIL of sysexits.h: stopped by somebody else, and the same command goes on
ANSWERS = 15.0  # seconds within which a host that is there answers
# Seconds, beyond those that silence may last, from the last word of a host to the end of its ranks: our last beats to it, and the
# time that its agent gives the ranks.
ORPHANED = 15.0
SUSPENDED = 3600.0  # seconds that ranks go on without a launch that was suspended by Ctrl-Z


@dataclass
class Options:
    """How to launch; None lets launch choose.

    start_timeout: seconds from the first rank's readiness to the last one's; silence: seconds without a word of a host, or of
    launch, after which that is lost; log_limit: MiB of a log
    project: hash of the code that the run began with, where it has begun (host_facts.project_hash)
    check: called before the first attempt with the open lines and the run's name; raises UserError where a host is not sound
    """

    launcher: str
    environment: dict[str, str]
    master_addr: str | None = None
    master_port: int | None = None
    start_timeout: float = 300.0
    silence: float = SILENCE
    log_limit: float = LIMIT
    project: str | None = None
    check: Callable[[list[Channel], str], Awaitable[None]] | None = None


def listen(ask: Callable[..., None], *given: object) -> None:
    """Have ask(number, *given) called for each signal that wants this process to end, except those that it ignores (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, ask, number, *given)


class Launch:
    """One launch, from the first connection to the last process's end."""

    def __init__(self, job: Job, options: Options, output: Output, attempt: int = 1) -> None:
        self.job, self.options, self.output, self.attempt = job, options, output, attempt
        self.name = secrets.token_hex(8)  # of all processes of this launch
        self.events: asyncio.Queue[News] = asyncio.Queue()
        self.channels: list[Channel] = []
        rank = 0
        for host, slots in job.hosts.items():
            line = transport(host, options.launcher)
            self.channels.append(Channel(host, range(rank, rank + slots), line, self.events, options.silence))
            rank += slots
        self.judge = Judge(self.channels, launchers.program(options.launcher), options.start_timeout, output)
        training = job.settings.recipe.training
        if training.hang_timeout != "auto":
            self.judge.leave_within = training.hang_timeout or math.inf
        if training.reports_elsewhere:
            self.judge.leave_within = max(self.judge.leave_within, UPLOAD)
        if job.settings.remote:  # it may upload a model
            self.judge.leave_within = math.inf
        self.marker = job.output_dir.absolute() / "success.json"  # whatever a rank says
        self.before: Fields = {}  # progress of the output directory when the launch began,
        self.after: Fields = {}  # and when it ended before its time
        self.started = self.succeeded = self.stopped_twice = False
        self.stop_signal = 0

    async def run(self) -> int:
        """Return the exit code: 0 when train.py reached its end, 2 for a user's mistake, 1 for any other failure, 128 +
        the signal that stopped this process, TRY_LATER when somebody stopped the ranks. Raises UserError before anything is
        started."""
        starting = asyncio.ensure_future(self._start())
        listen(self._on_signal, starting)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, self._on_suspend)
        try:
            with suppress(asyncio.CancelledError):  # a signal came before the start was done
                await starting
            while not self.stop_signal and not self.judge.decided():
                await self._hear()
                self.judge.check_start()
                self.judge.check_hang()
                self.judge.check_end()
            await self._let_them_save()
            await self._stop(STOPPED_GRACE if self.stop_signal else FAILED_GRACE)
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTSTP)
            await asyncio.gather(*(channel.close() for channel in self.channels))
        return self._conclude()

    async def _start(self) -> None:
        """Meet the hosts, then start the launcher of each."""
        launcher, cwd = self.options.launcher, str(Path.cwd())
        environment = self.options.environment | {LAUNCHED: "{launched.json}"}
        await rendezvous.connect(self.channels)
        rendezvous.check_code(self.channels, self.options.project)
        rendezvous.check_alike(self.channels, environment.get("CUDA_VISIBLE_DEVICES"))
        program = launchers.command(launcher, self.job, launchers.Place(0, "", 0))[0]
        script = [str(Path(self.job.script).absolute())] if self.job.script else []
        await rendezvous.check_files(self.channels, [program, cwd, *script])
        if self.options.check and self.attempt == 1:
            await self.options.check(self.channels, self.name)
        self.before = await self.channels[0].ask("progress", directory=str(self.marker.parent))
        if self.before.get("stop") and not self.before.get("finished"):
            file = self.marker.with_name(stop.FILE)
            if self.attempt == 1:
                raise stop.refusal(file)
            self.judge.stop_before_start(f"by the file {file}, which has to be removed first")
            self.after = self.before | {"stopped": stop.name(0)}
            return
        # Each attempt has a port of its own: a rank of the last one that still looks for the others finds nobody. So has each
        # replica of an elastic run: two of them may start at once on one host.
        usual = rendezvous.DEFAULT_PORT + (self.attempt - 1 + self.job.replica) % 100
        meeting = await rendezvous.find(self.channels, self.options.master_addr, self.options.master_port, usual)
        texts = launchers.files(launcher, self.job) | {"launched.json": json.dumps(launched_texts())}
        order: Fields = {"run": self.name, "cwd": cwd, "files": texts}
        self.started, self.judge.since = True, self.judge.clock.now()
        answers = []
        for number, channel in enumerate(self.channels):
            interface = meeting.interfaces[channel.host]
            names = ("GLOO_SOCKET_IFNAME",) if interface == "lo" else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            sockets = {name: interface for name in names if interface and name not in environment}
            command = launchers.command(launcher, self.job, launchers.Place(number, meeting.address, meeting.port))
            here = order | {"command": command, "environment": environment | sockets, "ranks": channel.slots}
            answers.append(channel.ask("start", **here))
            where = f"{interface or '?'} to {meeting.address}:{meeting.port}"
            self.output.set(channel.host, f"starting {counted(channel.slots, 'rank')} by {launcher}, {where}")
        await asyncio.gather(*answers)

    async def _hear(self, timeout: float = 0.25) -> None:
        """Let the judge take in what has come, waiting up to `timeout` seconds for something."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                event = await self.events.get()
            while True:
                channel, kind, fields = event
                self.judge.hear(channel, kind, fields)
                if self.events.empty():
                    break
                event = self.events.get_nowait()
        self.judge.check_silence()

    def _on_signal(self, number: int, starting: asyncio.Future[None]) -> None:
        if self.stop_signal:  # the second time: at once
            self.stopped_twice = True
            for channel in self.channels:
                channel.tell("stop", grace=0)
        self.stop_signal = self.stop_signal or number
        self.judge.stopping = True
        starting.cancel()

    async def _let_them_save(self) -> None:
        """Ask all ranks for a checkpoint where a user stops a run that trains, and wait until they have ended, or for as long as
        they say that takes. Ranks before their first step end at once."""
        if not self.stop_signal or self.stopped_twice or not self.judge.trains():
            return
        name = signal.Signals(self.stop_signal).name
        longer = ", or as long as a step may take that is no hang" if self.stop_signal == signal.SIGINT else ""
        self._say(
            f"{name}: the ranks have {self.judge.grace:.0f} s to finish their step and save a checkpoint{longer}; "
            f"a second {name} ends them at once"
        )
        number = signal.SIGINT if self.stop_signal == signal.SIGINT else signal.SIGTERM  # which stopped.json names
        for channel in self.channels:
            channel.tell("finish", number=number)
        asked = time.monotonic()  # the ranks tell how long they may take once they hear of it
        while (
            time.monotonic() < asked + self.judge.grace
            and not self.stopped_twice
            and len(self.judge.ended) < len(self.channels)
        ):
            await self._hear()

    def _on_suspend(self) -> None:
        """Let the hosts go on for an hour after Ctrl-Z. The first beat after `fg` tells them the usual patience again."""
        for channel in self.channels:
            channel.tell("beat", patience=max(SUSPENDED, self.options.silence))
        os.kill(os.getpid(), signal.SIGSTOP)

    async def _stop(self, grace: float) -> None:
        """Stop all ranks on all hosts; returns when every host that still answers has none left."""
        self.judge.stopping = True
        for channel in self.channels:
            channel.tell("stop", grace=grace)
        deadline = time.monotonic() + grace + ANSWERS
        while self.started and time.monotonic() < deadline:
            if all(channel.stopped or not channel.open for channel in self.channels):
                break
            await self._hear()
        if self.started and not self.stop_signal:
            self.after = await self._progress()
            lost = any(failure.kind == "lost" for failure in self.judge.failures)
            # Whose last words were lost with the line may have ended well all the same: then the marker is a new one.
            finished = self.after.get("finished")
            anew = lost and finished != self.before.get("finished")
            self.succeeded = bool(finished) and (self.judge.reached_end or anew)
        if self.judge.reached_end and not self.succeeded:
            self.judge.unfinished(f"train.py said that it ended well, but {self.marker} is not there")

    async def _progress(self) -> Fields:
        """Ask the first host about the output directory, over a new line where the old one is gone; else ask another
        (they may share the directory, or each have its own). by_first: whether it was the first; {}: no answer."""
        first = self.channels[0]
        again = Channel(first.host, first.ranks, first.transport, asyncio.Queue())
        try:
            for channel in (first, again, *self.channels[1:]):
                with suppress(UserError):
                    if channel is again:
                        await again.connect(ANSWERS)
                    if channel.open:
                        told = await channel.ask("progress", timeout=5, directory=str(self.marker.parent))
                        return told | {"by_first": channel.host == first.host}
        finally:
            await again.close()
        return {}

    def _conclude(self) -> int:
        """Say how it ended; the exit code."""
        for channel in self.channels:
            if self.started and not channel.stopped:
                self._say(
                    f"{channel.host} does not say whether its ranks have ended; they end by themselves within "
                    f"{self.options.silence + ORPHANED:.0f} s of losing the line"
                )
        failures = self.judge.failures
        if self.succeeded:
            for failure in failures:  # a launcher's tear-down, say: the run is what counts
                self._say(f"after the run's end: {failure.in_words()}")
            self._say(f"succeeded: {self.marker}; logs in {self.output.directory}")
            return 0
        if failures:
            failure = first_failure.first(failures)
            self._say("\n".join(self._verdict(failure)))
            return failure.exit_code
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            how = (
                f"ended at once by the second {name}"
                if self.stopped_twice
                else f"stopped by {name} {self.judge.stopped}"
            )
            self._say(f"{how.strip()}; the same command goes on from the newest checkpoint")
            return 128 + self.stop_signal
        self._say(f"stopped {self.judge.stopped}; the same command goes on from the newest checkpoint")
        return TRY_LATER

    def _verdict(self, failure: Failure) -> list[str]:
        """The lines that tell who failed first and how, its last lines, and where the rest is."""
        name = self.judge.log(failure.rank) if failure.rank is not None else f"launcher-{failure.host}"
        seconds, hosts = self.judge.clock.now() - failure.at, counted(len(self.channels), "host")
        return [
            *first_failure.report(failure, self.output.tail(name), self.output.path(name)),
            *self.judge.were_asked(),
            f"all ranks on {hosts} stopped {seconds:.1f} s after that; logs of all ranks: {self.output.directory}",
        ]

    def _say(self, line: str) -> None:
        self.output.say(line, sys.stderr)
