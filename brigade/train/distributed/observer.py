"""A look at a rank's heartbeat: how long it has stood still, and whether the run's own steps explain that."""

from pathlib import Path
from time import monotonic

from ..host import processes
from . import heartbeat
from .heartbeat import BEATS, BYTES, LEAST, LONGEST, OF_A_STEP, PHASE, STEP, TIMEOUT
from .process import this_process

LOOK = 1.0  # seconds between two looks at a heartbeat
# so many times the longest visit of a phase so far, or of any phase of a step, are no hang
TIMES, TIMES_A_STEP = 10, 30
FIRST_STEP = 900.0  # seconds of silence in a phase that has no first visit yet: kernels are compiled
# phase -> seconds of silence that are no hang: before its first visit is over; at least, later on. What comes before the data is
# known (packages, tokenising) may take hours, and the start has a limit of its own (launch's --start_timeout).
_LIMITS = {
    heartbeat.STARTING: (float("inf"), float("inf")),
    heartbeat.LOADING: (3600.0, 3600.0),  # weights over a slow network, kernels that are compiled
    heartbeat.WINDOW: (3600.0, 900.0),
    heartbeat.MEASURING: (900.0, 900.0),  # a device that is shared, throttled, or computes bf16 by other instructions
    heartbeat.SYNCHRONISING: (3600.0, 900.0),  # of replicas, over a slow network
    heartbeat.EVALUATION: (1800.0, 600.0),
    heartbeat.CHECKPOINT: (3600.0, 900.0),
}
# phase -> at least so many seconds, and bytes per second, where it is known what a host may have to write. An evaluation shows
# that it moves with each batch and each token of an answer, in which all weights may have to come from a disk; a checkpoint with
# each byte that is written, but not while states are gathered or a disk takes what it was given: all of it, where memory takes
# it first, at what is left for one host of a disk in a cloud or of a shared file system.
_RATES = {heartbeat.EVALUATION: (300.0, 5e8), heartbeat.CHECKPOINT: (300.0, 5e7)}
_LONGEST = 3600.0  # seconds: no memory keeps more back than a disk takes in an hour
_MOVES_FILES = (heartbeat.LOADING, heartbeat.WINDOW, heartbeat.CHECKPOINT)
MOVED = 2**16  # bytes between two looks that show that a rank moves on, however slowly
STOPPED = {"T": 5.0, "t": 180.0}  # seconds: by SIGSTOP or Ctrl-Z; by a debugger, which somebody uses


class Observer:
    """What looks at this rank's heartbeat. silent: seconds that it has stood still, as far as this process saw."""

    def __init__(self, pid: int) -> None:
        self.pid, self.silent = pid, 0.0
        self._stopped = 0.0  # seconds of them, in which its process was stopped at every look
        self._beats, self._looked, self._over, self._bytes = -1.0, 0.0, False, 0

    def look(self) -> bool:
        """Whether it is silent for longer than the rank's own steps explain. Call it every LOOK seconds or more often."""
        page = this_process.heartbeat.page
        now, beats = monotonic(), page[BEATS]
        passed = min(now - self._looked, 2 * LOOK)
        if passed >= LOOK:
            state = stopped_by(self.pid)
            goes_on = bool(self._stopped) and not state  # what it was kept from doing takes its usual time from here
            moved, self._beats = self._moves_files() or beats != self._beats or goes_on, beats
            self.silent = 0.0 if moved else self.silent + passed
            self._stopped = self._stopped + passed if state and not moved else 0.0
            self._looked = now
            over = self._stopped > may_be_stopped(state) if state else self.silent > limit(int(page[PHASE]))
            self._over = over and self.silent > LOOK
        return self._over

    def _moves_files(self) -> bool:
        """Whether it reads or writes, where that is what it is there for: one save of 810 GB is one visit of a phase."""
        if this_process.heartbeat.page[PHASE] not in _MOVES_FILES:
            return False
        before, self._bytes = self._bytes, bytes_moved(self.pid)
        return self._bytes - before >= MOVED

    def seen(self) -> dict[str, object]:
        """What it says, for messages and files: phase, step, seconds of silence, and whether the process is stopped."""
        page = this_process.heartbeat.page
        phase, step = heartbeat.PHASES[int(page[PHASE])], int(page[STEP])
        return {"phase": phase, "step": step, "seconds": round(self.silent, 1), "stopped": bool(stopped_by(self.pid))}


def limit(phase: int) -> float:
    """Seconds of silence that are not yet a hang in this phase, of a rank that runs."""
    page = this_process.heartbeat.page
    timeout, longest = page[TIMEOUT], page[LONGEST + phase]
    if timeout == 0:
        return float("inf")
    if phase not in _LIMITS:
        if not longest:
            return max(FIRST_STEP, timeout)
        of_a_step = max(page[LONGEST + step_phase] for step_phase in OF_A_STEP)
        return timeout if timeout > 0 else max(page[LEAST], TIMES_A_STEP * of_a_step)
    first, later = _LIMITS[phase]
    if phase in _RATES and (size := page[BYTES]):
        least, rate = _RATES[phase]
        first = later = max(least, 3 * page[LEAST], min(size / rate, _LONGEST))
        if phase == heartbeat.EVALUATION:  # one before the first step has the run's first pass
            first = max(first, FIRST_STEP)
    return max(later if longest else first, timeout, TIMES * longest)


def may_be_stopped(state: str) -> float:
    """Seconds for which a process may be stopped. state: of stopped_by()"""
    timeout = this_process.heartbeat.page[TIMEOUT]
    return float("inf") if timeout == 0 else min(STOPPED[state], timeout) if timeout > 0 else STOPPED[state]


def stopped_by(pid: int) -> str:
    """Whether a process of this host was stopped: T by SIGSTOP or Ctrl-Z, t by a debugger; else nothing."""
    state = "".join(processes.status(pid)[:1])
    return state if state in STOPPED else ""


def bytes_moved(pid: int) -> int:
    """Bytes that a process of this user has read and written so far; 0 where nobody counts them."""
    try:
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return sum(int(counts[key]) for key in ("rchar", "wchar", "read_bytes"))
    except (OSError, ValueError, KeyError):
        return 0
