"""What `launch --restarts` may do after a failure: does it repeat, which hosts carry the next attempt, and after what pause."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..errors.console import counted
from .first_failure import Failure
from .job import Job

LONGEST_PAUSE = 300.0  # seconds
# What a rank reports when a device of its host fails. Other errors of CUDA are mostly the program's.
_OF_A_DEVICE = re.compile(
    r"uncorrectable|ECC error|NVLink|fallen off the bus|no CUDA-capable device|device\(s\) is/are busy or unavailable"
    r"|hardware (stack )?error|unknown error|system not yet initialized",
    re.IGNORECASE,
)
# A user's mistake by its exit code, but one that passes: what an attempt that is ending still holds.
_PASSES = re.compile(r"another run is using it|rendezvous at |in use by ")
_EXCEPTIONS = ("reported", "exit", "unfinished")


# A job that its scheduler starts again runs the same command again, and that must go on from the newest checkpoint.
NOT_TWICE = {
    "fresh": "each start of the job would begin anew",
    "resume_from_checkpoint": "each start of the job would go back to that checkpoint",
    "rehearse": "a rehearsal leaves no run that could be continued or judged",
}


@dataclass(frozen=True)
class Policy:
    """restarts: at most so many; min_hosts: None for as many as the job has; pause: seconds before the first restart, doubled by
    each that brings no new checkpoint"""

    restarts: int = 0
    min_hosts: int | None = None
    spares: tuple[str, ...] = ()
    pause: float = 10.0


@dataclass(frozen=True)
class Fault:
    """What ended an attempt.

    hosts: at fault, () where that is not known or no host's
    begun: the attempt trained; then step: reached, checkpoint: newest one, as far as known
    where: host and rank that said `text`
    """

    kind: str
    text: str
    hosts: tuple[str, ...] = ()
    code: int = 1
    step: int | None = None
    checkpoint: int | None = None
    where: str = ""
    begun: bool = False

    @property
    def signature(self) -> tuple[Any, ...]:
        """The last line of what was reported, without what differs each time (addresses, process ids, sizes), and where in the
        run it was."""
        return self.kind, re.sub(r"0x[0-9a-f]+|\d+", "#", self._last_line), self.step, self.checkpoint

    @property
    def in_words(self) -> str:
        return f"{self.where} failed first: {self._last_line}" if self.where else self._last_line

    @property
    def _last_line(self) -> str:
        """Of a traceback its exception, of a user's mistake the problem: its cure stands below."""
        lines = [line.strip() for line in self.text.strip().splitlines() if not line.startswith("  cure: ")]
        return (lines or [""])[-1]


def fault_of(failure: Failure) -> Fault:
    """An attempt's first failure as what to do about it asks."""
    of_host = failure.kind in ("lost", "signal", "launcher", "hang") or (
        failure.kind == "reported" and bool(_OF_A_DEVICE.search(failure.text))
    )
    if failure.kind not in _EXCEPTIONS or not failure.text:
        return Fault(failure.kind, failure.in_words(), (failure.host,) if of_host else (), failure.exit_code)
    where = "" if failure.kind == "unfinished" else f"{failure.host}, rank {failure.rank}"
    return Fault(failure.kind, failure.text, (failure.host,) if of_host else (), failure.exit_code, where=where)


def would_repeat(faults: list[Fault]) -> str | None:
    """Why another attempt would fail like the last one, in words; None: it may well not."""
    last = faults[-1]
    if last.code == 2 and not last.hosts and not _PASSES.search(last.text):
        return "a mistake that somebody has to correct"
    if len(faults) > 1 and last.kind in _EXCEPTIONS and not last.hosts:
        before = faults[-2]
        if before.signature == last.signature:
            at = "" if last.step is None else f" at step {last.step}"
            return f"the same exception twice{at}"
    return None


def next_hosts(
    wanted: dict[str, int], spares: tuple[str, ...], least: int, faults: list[Fault], sound: set[str], unit: int = 1
) -> dict[str, int]:
    """Hosts and slots of the next attempt: of the sound ones those that were least often at fault, at most as many as wanted, and
    so many that their ranks are a multiple of `unit` (Axes.unit). {} where fewer than `least` are left.

    Where no spare is left, a sound host is given a second chance. At fault twice in succession, it has had it.
    A spare takes the slots of a host that it replaces.
    """
    blamed = Counter(host for fault in faults for host in fault.hosts)
    twice = set(faults[-1].hosts) & set(faults[-2].hosts) if len(faults) > 1 else set()
    order = [*wanted, *spares]
    usable = [host for host in order if host in sound]
    without = [host for host in usable if host not in twice]
    usable = without if len(without) >= least else usable
    if len(usable) < least:
        return {}
    best = sorted(usable, key=blamed.__getitem__)
    for count in range(min(len(best), len(wanted)), least - 1, -1):
        chosen = sorted(best[:count], key=order.index)
        vacant = [slots for host, slots in wanted.items() if host not in chosen]
        found = {host: wanted[host] if host in wanted else vacant.pop(0) for host in chosen}
        if sum(found.values()) % unit == 0:
            return found
    return {}


def pause(policy: Policy, faults: list[Fault]) -> float:
    """Seconds before the next attempt."""
    idle = 0
    for before, last in zip(faults[-2::-1], faults[:0:-1], strict=True):
        if (last.checkpoint or 0) > (before.checkpoint or 0):
            break
        idle += 1
    return min(max(LONGEST_PAUSE, policy.pause), policy.pause * 2**idle)


# ---- what it cannot be --------------------------------------------------------------------------------------------------------
def check(job: Job, policy: Policy) -> None:
    """Raises UserError for a policy that this job cannot be restarted by."""
    for flag, given in (("min_hosts", policy.min_hosts), ("spare", policy.spares)):
        if given and not policy.restarts:
            raise UserError(f"flag --{flag}", "it says how to start again, which nothing asks for", "add --restarts 3")
    if (policy.min_hosts or 1) > len(job.hosts):
        problem = f"{policy.min_hosts} hosts are more than the {len(job.hosts)} that the run begins with"
        raise UserError("flag --min_hosts", problem, "give a smaller number")
    axes, slots = job.strategy.axes, min(job.hosts.values())
    if policy.min_hosts and (policy.min_hosts * slots) % axes.unit:
        enough = next(
            count
            for count in range(policy.min_hosts, axes.unit * policy.min_hosts + 1)
            if not count * slots % axes.unit
        )
        problem = f"{axes} does not divide the {policy.min_hosts * slots} ranks of {counted(policy.min_hosts, 'host')}"
        raise UserError("flag --min_hosts", problem, f"give {enough}")
    if twice := next((host for host in policy.spares if policy.spares.count(host) > 1), None):
        raise UserError("flag --spare", f"{twice} is named twice", "name it once")
    if twice := next((host for host in policy.spares if host in job.hosts), None):
        cure = "name another host, or leave it out there"
        raise UserError("flag --spare", f"{twice} is in the hostfile already", cure)
    for flag, why in NOT_TWICE.items():
        if policy.restarts and getattr(job.settings, flag):
            cure = "start the run once with that flag alone; the same command without it continues, with --restarts"
            raise UserError(f"flag --{flag}", f"{why} (--restarts)", cure)


def for_slurm(policy: Policy, kind: str) -> tuple[str, ...]:
    """The flags with which a written sbatch script starts again by itself. Raises UserError for other kinds of job files."""
    if not policy.restarts:
        return ()
    if kind != "sbatch":
        raise UserError("flag --restarts", "only a written sbatch script starts again by itself", "leave it out")
    if policy.spares:
        problem = "a job is given its hosts when it starts"
        raise UserError("flag --spare", problem, "ask for more hosts (--nodes), and give --min_hosts")
    least = ("--min_hosts", str(policy.min_hosts)) if policy.min_hosts else ()
    return ("--restarts", str(policy.restarts), *least)


def check_memory(job: Job) -> None:
    """Raises UserError where the planner says that a job's GPUs cannot hold it. Of other devices, and of models that no formula
    covers, it says nothing."""
    from ..planner.choice.job_of_recipe import too_large

    if problem := too_large(job.settings, job.strategy, job.hosts):
        raise UserError(counted(len(job.hosts), "host"), problem, "repair a host, name a --spare, or raise --min_hosts")
