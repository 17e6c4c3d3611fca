"""Which host and rank failed first, and how to say it."""

import signal
from dataclasses import dataclass

# What a process was killed by, when nobody says by whom.
_LIKELY = {
    signal.SIGKILL: "nobody says who sent it; mostly the kernel, out of memory: `dmesg | grep -i oom` on {host}",
    signal.SIGSEGV: "a crash inside a library: its stack stands in the log when PYTHONFAULTHANDLER=1 is set",
    signal.SIGBUS: "mostly /dev/shm is full: `df -h /dev/shm` on {host}",
    signal.SIGABRT: "a library gave up: the lines above say why",
}
RACE = 5.0  # seconds within which a lost host or a killed rank explains what other ranks then report


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong.

    at: seconds on the launching host's clock when it was heard; kind: "lost" (host), "signal", "told" (the rank said why),
    "exit", "launcher" (it ended, or never started its ranks), "hang", "unfinished" (all ended well, but train.py did not)
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
        if self.kind == "signal" and self.code:
            return f"{where} failed first: killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        if self.kind == "exit":
            return f"{where} failed first: exit code {self.code}"
        if self.kind == "told":
            return f"{where} failed first"
        if self.kind == "unfinished":
            return self.text
        return f"{where} failed first: {self.text}"

    def cure(self) -> str | None:
        if self.kind == "signal" and self.code and -self.code in _LIKELY:
            return _LIKELY[signal.Signals(-self.code)].format(host=self.host)
        return None


def first(failures: list[Failure]) -> Failure:
    """The failure that explains the others: the earliest, but a host that was lost or a rank that was killed goes before
    what its peers say of their closed connections a moment earlier or later."""
    earliest = min(failures, key=lambda failure: failure.at)
    for kind in ("lost", "signal"):
        causes = [failure for failure in failures if failure.kind == kind and failure.at - earliest.at < RACE]
        if causes and earliest.kind in ("told", "exit", "launcher"):
            return min(causes, key=lambda failure: failure.at)
    return earliest


def exit_code(failure: Failure) -> int:
    """2 for a user's mistake that train.py told, else 1."""
    return 2 if failure.code == 2 else 1
