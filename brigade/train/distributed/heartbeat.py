"""A rank's heartbeat: the step and the phase it is in, in memory that others may read while it hangs.

A switch of phase is a few stores into a page of shared memory, about a microsecond and no system call
(`python -m benchmarks.watching`). Under `launch` the rank's watching process, which shares the page by fork, watches it;
everywhere a thread of the rank does (watch/watch_thread.py). The watcher counts silence on its own clock and in looks: one that
was suspended itself has not seen the time go by.

The page, as float64: beats, phase, step, seconds of `hang_timeout` (-1: auto, 0: never), the least seconds of silence within a
step that may be a hang, the bytes that one host may have to write for a checkpoint (0: not known), then the longest visit of each
phase, and the tokens that this rank has trained on.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal, get_args

Phase = Literal["starting", "loading", "window", "data", "forward", "backward", "measuring", "optimizer", "synchronising",
                "evaluation", "checkpoint"]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
STARTING, LOADING, WINDOW, DATA, FORWARD, BACKWARD, MEASURING, OPTIMIZER, SYNCHRONISING, EVALUATION, CHECKPOINT = range(
    11
)
BEATS, PHASE, STEP, TIMEOUT, LEAST, BYTES, LONGEST = range(7)
OF_A_STEP = (DATA, FORWARD, BACKWARD, OPTIMIZER)
TOKENS = LONGEST + len(PHASES)
AUTO = -1.0
FOLDER = "heartbeats"  # in the output directory: a file of each rank (watch/watch_thread.py)
FADES = 0.95  # the longest visit of a step's phases, with each step: a first one that compiled must not excuse an hour later on
SECONDS, SECONDS_WAITING = 60.0, 300.0  # of LEAST; where any step may compile again, or wait for a tracker's server


class Heartbeat:
    """This process's page, and what it has spent in each phase.

    page: as above; seconds: spent in each phase since begin(), of this process
    """

    def __init__(self) -> None:
        self.page = _new_page()
        self.page[TIMEOUT] = AUTO
        self.seconds = [0.0] * len(PHASES)
        self._shared = False  # whether this process's parent reads it; else a fork of ranks would share one page
        self._phase, self._since = STARTING, monotonic()

    def share(self) -> None:
        """Keep this page for all runs of this process: its parent reads it."""
        self._shared = True

    def begin(self, timeout: float | Literal["auto"], waits: bool = False) -> None:
        """Begin to measure a run, whose model is about to be loaded in this process.

        timeout: the recipe's hang_timeout; waits: whether a step may now and then wait for a compiler, or for a tracker's server
        """
        self.end()
        if not self._shared:
            self.page = _new_page()
        for phase in range(len(PHASES)):
            self.page[LONGEST + phase] = self.seconds[phase] = 0.0
        self.page[TOKENS] = self.page[BYTES] = 0.0
        self.page[LEAST] = SECONDS_WAITING if waits else SECONDS
        self.page[TIMEOUT] = AUTO if timeout == "auto" else timeout
        self.enter(LOADING, 0)

    def end(self) -> None:
        """Say that the run has reached its end: what follows may take as long as it likes."""
        self.enter(STARTING)

    def enter(self, phase: int, step: int | None = None) -> None:
        """This rank goes into a phase, or shows that it moves on within it. step: the one that begins here"""
        page, now = self.page, monotonic()
        took = now - self._since
        self.seconds[self._phase] += took
        if took > page[LONGEST + self._phase]:
            page[LONGEST + self._phase] = took
        self._phase, self._since = phase, now
        page[PHASE] = phase
        if step is not None:
            page[STEP] = step
            for step_phase in OF_A_STEP:
                page[LONGEST + step_phase] *= FADES
        page[BEATS] += 1.0  # last: who sees the others without it looks again in a second

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Say that this rank is in `phase`, for work between two steps, and then where it was."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


def _new_page() -> "memoryview[float]":
    # Anonymous and shared: a forked child writes, its parent reads.
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
