"""What a run does until its first step has ended, by this process's clock: phases that follow each other without a gap.

Waiting for other ranks belongs to the phase in which this one waits. Behind the first step nothing is taken down.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

SHORTEST = 0.01  # of the time that a start takes: what is shorter is told together
REST = "the rest"


@dataclass(frozen=True)
class Phase:
    """name: what the run did, in a user's words; began: seconds after the run's first phase did; seconds: how long it took"""

    name: str
    began: float
    seconds: float


class Timeline:
    """The phases of this process's newest run.

    phases: those that are over, in order; a name may come again
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._now: str | None = None  # the phase that goes on; None: nothing is taken down
        self._began = self._since = 0.0
        self._process: float | None = None

    def include_start(self) -> None:
        """Let the next run's timeline begin with this process, which was started for that run."""
        self._process = _age_of_process()

    def begin(self, name: str) -> None:
        """Begin a run's timeline, and its first phase; before it stands the interpreter's start, where that is the run's, too."""
        now, earlier = monotonic(), self._process
        self.phases, self._process = [], None
        self._now, self._since = name, now
        self._began = now if earlier is None else now - earlier
        if earlier is not None:
            self.phases.append(Phase("starting Python", 0.0, earlier))

    def enter(self, name: str) -> None:
        """The phase that went on is over, and this one begins. The same again: it goes on."""
        if self._now is None or name == self._now:
            return
        now = monotonic()
        self.phases.append(Phase(self._now, self._since - self._began, now - self._since))
        self._now, self._since = name, now

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """This phase inside another one, which then goes on."""
        before = self._now
        self.enter(name)
        try:
            yield
        finally:
            if before is not None:
                self.enter(before)

    def end(self) -> bool:
        """The first step has ended. Return whether this is the first to say so."""
        if self._now is None:
            return False
        self.enter("")
        self._now = None
        return True


def parts(phases: list[Phase]) -> dict[str, float]:
    """Seconds by name, in the order in which each name came first; the shortest together at the end, as `the rest`."""
    seconds: dict[str, float] = {}
    for phase in phases:
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
    whole = sum(seconds.values())
    told = {name: value for name, value in seconds.items() if value >= SHORTEST * whole}
    return told | ({REST: whole - sum(told.values())} if len(told) < len(seconds) else {})


def in_words(phases: list[Phase]) -> list[str]:
    """`first step after 6.1 s`, `starting Python 0.3 s`, `imports 2.9 s`, ..., `the rest 0.1 s`"""
    seconds = parts(phases)
    return [
        f"first step after {sum(seconds.values()):.1f} s",
        *(f"{name} {value:.1f} s" for name, value in seconds.items()),
    ]


def _age_of_process() -> float:
    """Seconds since this process was started or forked, to a hundredth; 0.0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return 0.0
    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
