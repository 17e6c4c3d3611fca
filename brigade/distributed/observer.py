"""Who looks at a rank's heartbeat: how long it has stood still, and whether the run's own steps explain that."""

from pathlib import Path
from time import monotonic

from . import heartbeat
from .heartbeat import BEATS, LONGEST, PHASE, STEP, TIMEOUT

LOOK = 1.0  # seconds between two looks at a heartbeat
TIMES = 10  # the longest visit of a phase so far, so many times, is no hang
# phase -> seconds of silence that are no hang: before its first visit is over; at least, later on. What comes before the data is
# known (packages, tokenising) may take hours, and the start has a limit of its own (launch's --start_timeout).
_LIMITS = {
    heartbeat.STARTING: (float("inf"), float("inf")),
    heartbeat.LOADING: (3600.0, 3600.0),  # weights over a slow network, kernels that are compiled
    heartbeat.WINDOW: (3600.0, 900.0),
    heartbeat.SYNCHRONISING: (3600.0, 900.0),  # of replicas, over a slow network
    heartbeat.EVALUATION: (1800.0, 600.0),
    heartbeat.CHECKPOINT: (3600.0, 900.0),
}
_OF_A_STEP = (900.0, 180.0)


class Observer:
    """Looks at this rank's heartbeat. silent: seconds that it has stood still, as far as this process saw."""

    def __init__(self, pid: int) -> None:
        self.pid, self.silent = pid, 0.0
        self._beats, self._looked, self._over = -1.0, 0.0, False

    def look(self) -> bool:
        """Whether it is silent for longer than the rank's own steps explain. Call it every LOOK seconds or more often."""
        now, beats = monotonic(), heartbeat.page[BEATS]
        if now - self._looked >= LOOK:
            moved, self._beats = beats != self._beats, beats
            self.silent = 0.0 if moved else self.silent + min(now - self._looked, 2 * LOOK)
            self._looked = now
            self._over = self.silent > LOOK and self.silent > self.limit()
        return self._over

    def limit(self) -> float:
        """Seconds of silence that are no hang in the phase that the rank is in."""
        timeout, phase = heartbeat.page[TIMEOUT], int(heartbeat.page[PHASE])
        if timeout == 0:
            return float("inf")
        learns = timeout < 0 or phase in _LIMITS
        first, least = _LIMITS.get(phase, _OF_A_STEP)
        least = max(least, timeout) if learns else timeout
        if is_stopped(self.pid):
            return timeout if timeout > 0 else _OF_A_STEP[1]
        longest = heartbeat.page[LONGEST + phase]
        if not longest:
            return max(first, least)
        return max(least, TIMES * longest) if learns else least

    def seen(self) -> dict[str, object]:
        """What it says, for messages and files: phase, step, seconds of silence, and whether the process is stopped."""
        phase, step = heartbeat.PHASES[int(heartbeat.page[PHASE])], int(heartbeat.page[STEP])
        return {"phase": phase, "step": step, "seconds": round(self.silent, 1), "stopped": is_stopped(self.pid)}


def is_stopped(pid: int) -> bool:
    """Whether a process of this host was stopped, by SIGSTOP, Ctrl-Z or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
