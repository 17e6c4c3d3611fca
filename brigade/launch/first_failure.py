"""Which host and rank failed first, and how to say it."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

# What a process was killed by, when nobody says by whom.
_LIKELY = {
    signal.SIGKILL: "nobody says who sent it; mostly the kernel, out of memory: `dmesg | grep -i oom` on {host}",
    signal.SIGSEGV: "a crash inside a library: its stack stands in the log when PYTHONFAULTHANDLER=1 is set",
    signal.SIGBUS: "mostly /dev/shm is full: `df -h /dev/shm` on {host}",
    signal.SIGABRT: "a library gave up: the lines above say why",
}
# What the last lines of a rank tell of its host.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|os error 28|Errno 28")
# Signals that somebody outside sends. Launchers end their other ranks by SIGTERM, and gloo aborts when a peer is gone.
_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
RACE = 5.0  # seconds within which a lost host or a killed rank explains what other ranks then report


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong.

    at: seconds on the launching host's clock when it was heard
    kind: "lost" (host), "signal", "told" (the rank said why), "exit", "launcher" (it ended, or started no rank), "hang",
    "unfinished" (all ended well, but train.py did not), "follows" (a rank that stopped because of another's failure)
    code: exit code, negative for a signal; text: what is known
    """

    at: float
    kind: str
    host: str
    rank: int | None = None
    code: int | None = None
    text: str = ""

    def in_words(self) -> str:
        where = self.host if self.rank is None else f"{self.host}, rank {self.rank}"
        more = f", {self.text}" if self.text else ""
        if self.kind == "signal" and self.code:
            return f"{where} failed first: killed by signal {-self.code} ({_name(-self.code)}){more}"
        if self.kind == "exit":
            return f"{where} failed first: exit code {self.code}"
        if self.kind == "told":
            return f"{where} failed first"
        if self.kind == "follows":
            return f"{where} stopped because another rank failed first, and nobody heard of that one"
        if self.kind == "unfinished":
            return self.text
        return f"{where} failed first: {self.text}"

    def cure(self, tail: list[str]) -> str | None:
        """What may help. tail: the last lines of the rank or launcher."""
        if any(_FULL.search(line) for line in (*tail, self.text)):
            return f"make room: a disk of {self.host} is full, or your quota of it; `df -h` there names it"
        if self.kind == "signal" and self.code and -self.code in _LIKELY:
            return _LIKELY[signal.Signals(-self.code)].format(host=self.host)
        return None


def _name(number: int) -> str:
    """SIGKILL for 9; a real-time signal has no name."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def first(failures: list[Failure]) -> Failure:
    """The failure that explains the others: the earliest, but a host that was lost or a rank that was killed goes before
    what its peers say of their closed connections a moment earlier or later."""
    failures = [failure for failure in failures if failure.kind != "follows"] or failures
    earliest = min(failures, key=lambda failure: failure.at)
    for kind in ("lost", "signal"):
        causes = [
            failure
            for failure in failures
            if failure.kind == kind
            and failure.at - earliest.at < RACE
            and (kind == "lost" or -(failure.code or 0) in _CAUSES)
        ]
        if causes and earliest.kind in ("told", "exit", "launcher"):
            return min(causes, key=lambda failure: failure.at)
    return earliest


def exit_code(failure: Failure) -> int:
    """2 for a user's mistake that train.py told, else 1."""
    return 2 if failure.code == 2 else 1


def report(failure: Failure, tail: list[str], log: Path) -> list[str]:
    """The lines that tell a failure: where and how, the last lines of that rank or launcher, the cure if one is known."""
    lines = [f"error: {failure.in_words()}", *(f"  | {line}" for line in tail)]
    if tail:
        lines.append(f"  these are its last lines; all of them: {log}")
    if cure := failure.cure(tail):
        lines.append(f"  cure: {cure}")
    return lines
