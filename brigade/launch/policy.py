"""What `launch --restarts` may do after a failure: does it repeat, which hosts carry the next attempt, and after what pause."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from ..errors import UserError, Whose, shortened
from ..errors.console import counted
from ..hosts.job import Job
from ..plan.choice.job_of_recipe import too_large
from .first_failure import Failure

LONGEST_PAUSE = 300.0  # seconds
SHOWN = 200  # characters of an exception in the time line
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

    whose: errors/whose.py; hosts: at fault, () where that is not known or no host's
    told: a host's own word, or another's, that it cannot take part: no guess from how its ranks ended
    begun: the attempt trained; then step: the last that was whole, checkpoint: newest one, as far as known
    exact: the step is the ranks' own word, and not only the last that was logged
    where: host and rank that said `text`; log: of that rank
    """

    kind: str
    text: str
    hosts: tuple[str, ...] = ()
    code: int = 1
    step: int | None = None
    checkpoint: int | None = None
    where: str = ""
    begun: bool = False
    exact: bool = False
    whose: Whose = "run"
    told: bool = False
    log: str = ""

    @property
    def signature(self) -> tuple[str, str, int | None, int | None]:
        """The last line of what was reported, without what differs each time (addresses, process ids, sizes), and where in the
        run it was."""
        names = "|".join(map(re.escape, self.hosts)) or "#"
        words = re.sub(rf"\b({names})\b|0x[0-9a-f]+|\d+", "#", self._last_line)
        return self.kind, words, self.step, self.checkpoint

    @property
    def in_words(self) -> str:
        line = shortened(self._last_line, SHOWN)
        if len(self._last_line) > SHOWN and self.log:
            line += f" (the rest is in {self.log})"
        return f"{self.where} failed first: {line}" if self.where else line

    @property
    def _last_line(self) -> str:
        """The exception of a traceback, or the problem of a user's mistake, whose cure stands below it."""
        lines = [line.strip() for line in self.text.strip().splitlines() if not line.startswith("  cure: ")]
        return (lines or [""])[-1]


def fault_of(failure: Failure, log: str = "") -> Fault:
    """The fault that an attempt's first failure is. log: of the rank that failed"""
    hosts = (failure.hosts or (failure.host,)) if failure.whose == "host" else ()
    code, told = failure.exit_code, failure.kind == "reported"
    if failure.kind not in _EXCEPTIONS or not failure.text:
        return Fault(failure.kind, failure.in_words(), hosts, code, whose=failure.whose)
    where = "" if failure.kind == "unfinished" else f"{failure.host}, rank {failure.rank}"
    return Fault(failure.kind, failure.text, hosts, code, where=where, whose=failure.whose, told=told, log=log)


def would_repeat(faults: list[Fault], replaceable: bool = True) -> str | None:
    """Say why another attempt would fail like the last one; None: it may well not. replaceable: whether the run may go on
    without a host that is at fault"""
    last = faults[-1]
    if last.whose == "user":
        return "a mistake that somebody has to correct"
    hosts, told = ", ".join(last.hosts), last.told and last.whose == "host"
    if told and last.code == 2 and not replaceable:
        return f"{hosts} is at fault, and no other host may take its place (--spare, --min_hosts)"
    same = list(takewhile(lambda fault: fault.signature == last.signature, reversed(faults)))
    if told and len(same) > 1 and not set(same[1].hosts) & set(last.hosts):
        return f"the same fault on {', '.join(same[1].hosts)} and on {hosts}: it is no host's own"
    if told and len(same) > 2:
        return f"the same fault three times on {hosts}, and no other host takes its place"
    if last.whose == "run" and last.kind in _EXCEPTIONS and len(same) > 1:
        at = "" if last.step is None else f" at step {last.step}"
        return f"the same exception twice{at}"
    return None


def next_hosts(
    wanted: dict[str, int], spares: tuple[str, ...], least: int, faults: list[Fault], sound: set[str], unit: int = 1
) -> dict[str, int]:
    """Hosts and slots of the next attempt: of the sound ones those that were least often at fault, at most as many as wanted, and
    so many that their ranks are a multiple of `unit` (Axes.unit). {} where fewer than `least` are left.

    Where no spare is left, a sound host is given a second chance. At fault twice in succession, or once by a word that tells so,
    it has had it.
    A spare takes the slots of a host that it replaces.
    """
    blamed = Counter(host for fault in faults for host in fault.hosts)
    last = faults[-1] if faults else Fault("", "")
    before = last if last.told else faults[-2] if len(faults) > 1 else Fault("", "")
    out = set(last.hosts) & set(before.hosts)
    order = [*wanted, *spares]
    usable = [host for host in order if host in sound]
    without = [host for host in usable if host not in out]
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
    """Raise UserError for a policy that this job cannot be restarted by."""
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
    twice = next((host for host in policy.spares if policy.spares.count(host) > 1), None)
    if twice:
        raise UserError("flag --spare", f"{twice} is named twice", "name it once")
    twice = next((host for host in policy.spares if host in job.hosts), None)
    if twice:
        cure = "name another host, or leave it out there"
        raise UserError("flag --spare", f"{twice} is in the hostfile already", cure)
    for flag, why in NOT_TWICE.items():
        if policy.restarts and getattr(job.settings, flag):
            cure = "start the run once with only that flag; the same command without it continues, with --restarts"
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
    """Raise UserError where the planner says that a job's GPUs cannot hold it. Of other devices, and of models that no formula
    covers, it says nothing."""
    problem = too_large(job.settings, job.strategy, job.hosts)
    if problem:
        raise UserError(counted(len(job.hosts), "host"), problem, "repair a host, name a --spare, or raise --min_hosts")
