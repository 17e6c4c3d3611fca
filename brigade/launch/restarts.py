"""`launch --restarts`: after a failure the run starts again, without the host at fault where others can take its place.

    attempt -> what failed, and on which host? would it repeat? -> pause -> which hosts answer? -> next attempt

An attempt is a Launch with logs of its own. Nothing here touches a checkpoint: train.py continues from the newest good one.
"""

import asyncio
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..errors.console import Losses, counted
from ..errors.tables import Fields
from ..hosts import rendezvous
from ..hosts.connection import Channel, lines_to
from ..hosts.job import Job
from ..hosts.rendezvous import HostsFailed
from ..train.run import events, page
from . import first_failure
from .policy import Fault, Policy, fault_of, next_hosts, pause, would_repeat
from .status_and_logs import Output
from .supervisor import ORPHANED, Launch, Options, listen

Found = TypeVar("Found")


class Interrupted(Exception):
    """Somebody asked launch to end while no attempt was running."""


class Restarts:
    """One run, through as many attempts as it needs and may have.

    directory: of the logs; remake: the job on other hosts, which raises UserError where it cannot run there
    """

    def __init__(
        self, job: Job, how: Options, directory: Path, policy: Policy, remake: Callable[[dict[str, int]], Job]
    ) -> None:
        self.job, self.how, self.directory, self.policy, self.remake = job, how, directory, policy, remake
        self.wanted, self.own_code = dict(job.hosts), job.own_code()
        self.least = policy.min_hosts or len(self.wanted)
        self.faults: list[Fault] = []
        self.runs: list[str] = []  # names of the attempts, by which what is left of them is found
        self.orphans: dict[str, float] = {}  # host -> when whatever it may still run has ended, on our clock
        self.reference: tuple[str, Fields] | None = None  # a host of the first attempt, and its hello
        self.story: list[str] = []
        self.losses = Losses()
        self.lost: dict[int, int | None] = {}  # number of a fault -> steps; None: not known
        self.begun = False  # one attempt has trained: the output directory is this run's
        self.idle, self.since = 0.0, 0.0  # seconds between attempts, and when the last one ended
        self.signal = 0
        self._busy: asyncio.Future[Any] | None = None

    @property
    def _replaceable(self) -> bool:
        """Tell whether the run may go on without one of its hosts."""
        return bool(self.policy.spares) or self.least < len(self.wanted)

    async def run(self) -> int:
        """The exit code of the last attempt. Raises UserError for what the first one cannot begin with."""
        code = 1
        try:
            if self.policy.restarts and self._replaceable:
                listen(self._on_signal)
                await self._find_hosts()
            while True:
                code, fault = await self._attempt()
                if fault is None or not self.policy.restarts or not await self._recover(fault):
                    if fault and self.begun and self.job.settings.recipe.training.report_page:
                        page.of_failure(self.job.output_dir, fault.in_words)
                    return code
        except Interrupted:
            self._note(
                f"stopped by {signal.Signals(self.signal).name}; the same command goes on from the newest checkpoint"
            )
            return 128 + self.signal
        finally:
            if self.policy.restarts and len(self.story) > 2:
                if len(self.runs) > 1:
                    steps = self._steps(self.lost)
                    seen = self.begun and None not in self.lost.values()  # events.jsonl
                    known = f"{steps}, and " if seen else ""
                    self.story.append(f"lost: {known}{self.idle:.0f} s between attempts")
                print(f"time line of {counted(len(self.runs), 'attempt')}:", *self.story, sep="\n  ", file=sys.stderr)

    # ---- one attempt ---------------------------------------------------------------------------------------------
    async def _attempt(self) -> tuple[int, Fault | None]:
        """Make one attempt. Return its exit code, and what ended it before its time."""
        number, hosts = len(self.runs) + 1, list(self.job.hosts)
        self._note(f"attempt {number} on {', '.join(hosts)}")
        directory = self.directory / f"attempt-{number}" if self.policy.restarts else self.directory
        with Output(hosts, directory, self.how.log_limit, needed=number == 1, losses=self.losses) as output:
            launch = Launch(self.job, self.how, output, number)
            self.runs.append(launch.name)
            try:
                code = await launch.run()
            except UserError as error:
                if number == 1 and not (self.policy.restarts and self._replaceable and error.whose == "host"):
                    raise
                print(error, file=sys.stderr)
                told = not isinstance(error, HostsFailed)  # else the survey asks them once more
                words = f"{error.place}: {error.problem}"
                return 2, Fault("start", words, error.hosts, 2, whose=error.whose, told=told)
            finally:
                listen(self._on_signal)
        self.since = time.monotonic()
        for channel in launch.channels if launch.started else ():
            if not channel.stopped:
                silent = channel.hearing.seconds()
                self.orphans[channel.host] = self.since - silent + self.how.silence + ORPHANED
        self.reference = self.reference or (launch.channels[0].host, launch.channels[0].hello)
        self.how.project = self.reference[1].get("project")
        begun = any(launch.after.get(key) != launch.before.get(key) for key in ("started", "step"))
        self.begun |= begun
        if begun and "first" in launch.after:
            self._went_on_from(launch.after["first"])
        if code == 0 or launch.stop_signal:
            self._note("succeeded" if code == 0 else f"stopped by {signal.Signals(launch.stop_signal).name}")
            return code, None
        failures = launch.judge.failures
        fault = self._failed(launch) if failures else self._stopped(launch)
        if fault is None:
            return code, None
        done = launch.judge.done
        if begun or done is not None:  # else they are another run's, or of an attempt before
            checkpoint, logged = launch.after.get("checkpoint"), launch.after.get("step")
            step = logged if done is None else max(done, logged or 0)
            fault = replace(fault, begun=True, step=step, checkpoint=checkpoint, exact=done is not None)
        elif launch.judge.met() and not launch.after.get("by_first"):
            # Only the first host's directory says how far the run came, and it is gone: steps may be lost, nobody knows how many.
            fault = replace(fault, begun=True)
        return code, fault

    def _failed(self, launch: Launch) -> Fault:
        """The fault that ended an attempt before its time."""
        failure = first_failure.first(launch.judge.failures)
        log = "" if failure.rank is None else str(launch.output.path(launch.judge.log(failure.rank)))
        return fault_of(failure, log)

    def _went_on_from(self, step: int) -> None:
        """Count again what a fault cost: where the newest checkpoint was damaged, more is lost than was told at the fault."""
        number = max((number for number, fault in enumerate(self.faults) if fault.begun), default=-1)
        told = self.lost.get(number)
        if told is not None:
            self.lost[number] = lost = max(0, (self.faults[number].step or 0) - step)
            if lost != told:
                self._note(f"attempt {len(self.runs)} went on from step {step}: {self._steps([number])} lost")

    def _steps(self, numbers: Collection[int]) -> str:
        """Say how many steps these faults cost: from so many to so many where not every step is on record."""
        every = self.job.settings.recipe.training.logging_steps
        least = sum(self.lost[number] or 0 for number in numbers)
        unseen = sum(
            every - 1
            for number in numbers
            if not (self.faults[number].exact or self.faults[number].kind == "stopped")  # who stops saves its last
        )
        return f"{least} to {counted(least + unseen, 'step')}" if unseen else counted(least, "step")

    def _stopped(self, launch: Launch) -> Fault | None:
        """The fault of an attempt that somebody stopped in good order: None where it was by the file `stop`, which asks for no
        other, or by a signal to one rank, whose host may be about to go."""
        by = launch.after.get("stopped", "")
        if by == "the file stop":
            self._note(f"stopped by {by}")
            return None
        said = f"by {by}" if by else launch.judge.stopped or "by a signal"
        rank = re.search(r"rank (\d+)", said)
        hosts = (launch.judge.ranks[int(rank[1])].host,) if rank and int(rank[1]) in launch.judge.ranks else ()
        return Fault("stopped", f"stopped {said}", hosts, whose="passing")

    # ---- from one to the next --------------------------------------------------------------------------------------
    async def _recover(self, fault: Fault) -> bool:
        """Tell whether another attempt can begin, on the hosts of self.job."""
        self.faults.append(fault)
        lost = None if fault.step is None else max(0, fault.step - (fault.checkpoint or 0))
        if fault.begun:
            self.lost[len(self.faults) - 1] = lost
        newest = "no checkpoint" if fault.checkpoint is None else f"newest checkpoint: step {fault.checkpoint}"
        known = "" if lost is None else f"; step {fault.step}, {newest}: {self._steps([len(self.faults) - 1])} lost"
        self._note(f"{fault.in_words}{known}", "fault", hosts=fault.hosts, step=fault.step, lost=lost)
        why = would_repeat(self.faults, self._replaceable)
        if why:
            self._note(f"no restart: {why}")
            return False
        while len(self.faults) <= self.policy.restarts:
            seconds = pause(self.policy, self.faults)
            print(f"looking for hosts in {seconds:.0f} s ...", file=sys.stderr)
            await self._unless_interrupted(asyncio.sleep(seconds))
            try:
                found = await self._find_hosts()
            except UserError as error:
                print(error, file=sys.stderr)
                self._note(f"no restart: {error.place}: {error.problem}")
                return False
            if found:
                self.idle += time.monotonic() - self.since
                self._note(
                    f"restart {len(self.faults)} of {self.policy.restarts}", "restart", hosts=list(self.job.hosts)
                )
                return True
            self.faults.append(
                Fault("start", "too few hosts", step=fault.step, checkpoint=fault.checkpoint, whose="passing")
            )
        self._note(f"no restart: {counted(self.policy.restarts, 'restart')} used up")
        return False

    async def _find_hosts(self) -> bool:
        """Tell whether enough hosts can carry the next attempt; self.job is then the job on them.

        Raises UserError where the job cannot run on those that can.
        """
        now = self.job.own_code()
        changed = sorted(name for name in self.own_code if now.get(name) != self.own_code[name])
        if changed:
            cure = "the same command goes on from the newest checkpoint with the code that is there now"
            raise UserError(changed[0], "it changed while the run went on", f"{cure}; or bring the old file back first")
        pool = self.wanted | dict.fromkeys(self.policy.spares, max(self.wanted.values()))
        found = await self._unless_interrupted(survey(pool, self.how, self.runs, self.reference))
        for host, problem in found.unsound.items():
            self._note(f"{host} is left out: {problem}")
        unit = self.job.strategy.axes.unit
        hosts = next_hosts(self.wanted, self.policy.spares, self.least, self.faults, set(found.sound), unit)
        if not hosts:
            ranks = f", and ranks in multiples of {unit}" if unit > 1 else ""
            self._note(f"{counted(len(found.sound), 'host')} can carry the run, and it needs {self.least}{ranks}")
            return False
        left = max((end for host, end in self.orphans.items() if host not in found.sound), default=0.0)
        await self._unless_interrupted(asyncio.sleep(max(0.0, left - time.monotonic())))
        self.orphans = {}
        if hosts != self.job.hosts:
            self.job = self.remake(hosts)
        return True

    # ---- signals, words --------------------------------------------------------------------------------------------
    def _on_signal(self, number: int) -> None:
        self.signal = self.signal or number
        if self._busy:
            self._busy.cancel()

    async def _unless_interrupted(self, work: "Coroutine[None, None, Found]") -> "Found":
        self._busy = busy = asyncio.ensure_future(work)
        try:
            if self.signal:
                busy.cancel()
            return await busy
        except asyncio.CancelledError:
            raise Interrupted from None
        finally:
            self._busy = None

    def _note(self, line: str, event: str = "", **fields: object) -> None:
        """Add a line to the time line; with `event` also one of the run's events.jsonl, where its directory is seen from here."""
        self.story.append(f"{time.strftime('%H:%M:%S')}  {line}")
        if self.policy.restarts:
            print(self.story[-1], file=sys.stderr, flush=True)
        if event and self.begun:  # else the directory may be another run's
            events.add(self.job.output_dir, event, what=line, attempt=len(self.runs), **fields)


# ---- between two attempts: which hosts can carry the next one ------------------------------------------------------
@dataclass
class Survey:
    """unsound: host -> why it cannot take part; sound: host -> its hello"""

    unsound: dict[str, str] = field(default_factory=dict)
    sound: dict[str, Fields] = field(default_factory=dict)


async def survey(hosts: dict[str, int], how: Options, runs: list[str], reference: tuple[str, Fields] | None) -> Survey:
    """Ask every host: does it answer, is nothing of the earlier `runs` left on it, do its devices work?

    reference: a host and its hello, which the others must be like; None: they are compared with each other, and a difference
    raises UserError, as does one that nobody can reach when nobody else can be. Raises UserError where all have other code now.
    """
    found = Survey()
    channels = lines_to(hosts, how.launcher, how.silence)
    visible = how.environment.get("CUDA_VISIBLE_DEVICES")
    try:
        try:
            await rendezvous.connect(channels)
        except HostsFailed as error:
            found.unsound = dict(error.problems)
            if len(found.unsound) == len(hosts) and reference is None:
                raise
        channels = [channel for channel in channels if channel.open]
        rendezvous.check_code(channels, how.project)
        if reference is None:
            rendezvous.check_alike(channels, visible)
        await asyncio.gather(*(_examine(channel, runs, visible, found) for channel in channels))
        for channel in channels:
            differences = list(rendezvous.differences_of(channel, *reference[::-1], visible)) if reference else []
            if differences:
                found.unsound.setdefault(channel.host, differences[0][0])
            if channel.host not in found.unsound:
                found.sound[channel.host] = channel.hello
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    return found


async def _examine(channel: Channel, runs: list[str], visible: str | None, found: Survey) -> None:
    """Clear a host of earlier runs, and try its devices if there were any: something has failed then."""
    try:
        await channel.ask("clean", runs=runs)
        if runs and channel.hello["gpus"]:
            answer = await channel.ask("check", timeout=150, visible=visible)
            if "problem" in answer:
                found.unsound[channel.host] = answer["problem"]
    except UserError as error:
        found.unsound[channel.host] = error.problem
