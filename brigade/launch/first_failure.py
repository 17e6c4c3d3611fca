"""Failures of a launch: which of them came first, and in which words it is told."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from ..errors import Whose
from ..hosts.connection import CURES

# What the last lines of a rank tell of its host.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|os error 28|Errno 28")
# Whose a failure is that no rank has told.
WHOSE: dict[str, Whose] = {**dict.fromkeys(("lost", "signal", "launcher", "hang"), "host"), "rendezvous": "passing"}
# Signals that somebody outside sends. Launchers end their other ranks by SIGTERM, and gloo aborts when a peer is gone.
_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
RACE = 5.0  # seconds within which a lost host or a killed rank explains what other ranks then report


@dataclass(frozen=True)
class Failure:
    """A thing that went wrong.

    at: seconds on the clock of launch (hosts/hearing.py) when it was heard
    kind: "lost" (host), "signal", "reported" (the rank said why), "exit", "launcher" (it ended, or started no rank),
    "hang", "rendezvous" (ranks met, but do not reach each other), "unfinished" (all ended well, but train.py did not), "follows"
    (a rank stopped because of another's failure)
    code: exit code, negative for a signal; text: what is known; kept: where more is to be read, as a line
    said: whose it is (errors/whose.py), by the rank that reported it; hosts: at fault, () for its own
    """

    at: float
    kind: str
    host: str
    rank: int | None = None
    code: int | None = None
    text: str = ""
    kept: str = ""
    said: Whose | None = None
    hosts: tuple[str, ...] = ()

    @property
    def whose(self) -> Whose:
        """Whose fault it is: as was said, else as its kind tells."""
        return self.said or WHOSE.get(self.kind) or ("user" if self.is_mistake else "run")

    @property
    def is_mistake(self) -> bool:
        """Whether a rank reported a user's mistake. Exit code 2 alone is not one: any library may end a process with it."""
        return self.kind == "reported" and self.code == 2

    @property
    def _by_launch(self) -> bool:
        """Whether a line to a host was lost because launch itself stood still (judge.py)."""
        return self.kind == "lost" and self.said == "passing"

    def in_words(self) -> str:
        where = self.host if self.rank is None else f"{self.host}, rank {self.rank}"
        if self.kind in ("unfinished", "hang", "rendezvous") or self._by_launch:
            return self.text
        if self.kind == "follows":
            return f"{where} stopped because another rank failed first, but it is not known which"
        if self.kind == "signal" and self.code:
            how = f": killed by signal {-self.code} ({signal_name(self.code)})" + (
                f", {self.text}" if self.text else ""
            )
        else:
            exited = f": exit code {self.code}{self.text and ', '}{self.text}"
            others = f", by a fault of {', '.join(self.hosts)}" if self.hosts and self.host not in self.hosts else ""
            how = {"exit": exited, "reported": others}.get(self.kind, f": {self.text}")
        return f"{where} failed first{how}"

    def cure(self, tail: list[str]) -> str | None:
        """The cure that may help, if one is known. tail: the last lines of the rank or launcher."""
        if any(_FULL.search(line) for line in (*tail, self.text)):
            return f"make room: a disk of {self.host} is full, or your quota of it; `df -h` there names it"
        if self.kind == "rendezvous" or self._by_launch:
            return str(CURES["launch stood still" if self._by_launch else self.kind])
        cures: dict[str, str] = CURES["signals"] if self.kind == "signal" else {}
        return cures.get(signal_name(self.code or 0), "").replace("HOST", self.host) or None

    @property
    def exit_code(self) -> int:
        """The exit code of launch: 2 for a mistake, else 1."""
        return 2 if self.is_mistake else 1


def signal_name(code: int) -> str:
    """The name of the signal of an exit code: SIGKILL for -9; a real-time signal has none."""
    return next((known.name for known in signal.Signals if known == -code), f"signal {-code}")


def first(failures: list[Failure]) -> Failure:
    """The failure that explains the others: the earliest, but a host that was lost, a rank that was killed, asked to end,
    or left with exit code 0 goes before what its peers say of their closed connections a moment earlier or later."""
    everything = failures
    failures = [failure for failure in failures if failure.kind != "follows"] or failures
    earliest = min(failures, key=lambda failure: failure.at)
    if earliest.kind not in ("reported", "exit", "launcher"):
        return earliest
    near = [failure for failure in failures if failure.at - earliest.at < RACE]
    lost = [failure for failure in near if failure.kind == "lost"]
    killed = [failure for failure in near if failure.kind == "signal" and -(failure.code or 0) in _CAUSES]
    left = [failure for failure in near if failure.kind == "exit" and failure.code == 0]
    asked = [failure for failure in near if _was_asked_to_end(failure, everything)]
    return min(lost or killed or left or asked or [earliest], key=lambda failure: failure.at)


def _was_asked_to_end(failure: Failure, everything: list[Failure]) -> bool:
    """Tell whether a rank got SIGTERM from outside, before it obeyed signals, and not from its launcher after another's
    failure."""
    before = (
        other for other in everything if other.host == failure.host and other.at <= failure.at and other is not failure
    )
    return failure.code == -signal.SIGTERM and not any(before)


def report(failure: Failure, tail: list[str], log: Path) -> list[str]:
    """The lines that tell a failure: where and how, the last lines of that rank or launcher, the cure if one is known."""
    quoted = [*(f"  | {line}" for line in tail), f"  these are its last lines; all of them: {log}"] if tail else []
    cure = failure.cure(tail)
    kept = [f"  {failure.kept}"] if failure.kept else []
    return [f"error: {failure.in_words()}", *kept, *quoted, *([f"  cure: {cure}"] if cure else [])]
