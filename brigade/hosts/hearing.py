"""How long the other end of a line has said nothing, and whether this end stood still. Needs only the standard library: agents
run it."""

import math
import time

BEAT = 2.0  # seconds: how often each end says that it is there
SILENCE = 60.0  # seconds after which the other end is lost, unless `launch --silence` says otherwise
STOPPED = 5.0  # seconds between two looks at the clock: whoever is later was stopped itself, or its machine stood still
# Linux's CLOCK_MONOTONIC stops while a laptop sleeps, and this one does not.
_WITH_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME)


class Clock:
    """Seconds in which this process has run: not while it was stopped (Ctrl-Z, SIGSTOP, a virtual machine that moves), nor while
    its host slept. Must be asked more often than every STOPPED seconds."""

    def __init__(self) -> None:
        self._looked, self._slept = time.monotonic(), time.clock_gettime(_WITH_SLEEP)
        self._away = self._still = 0.0
        self._woke = -math.inf

    def now(self) -> float:
        now, with_sleep = time.monotonic(), time.clock_gettime(_WITH_SLEEP)
        stopped = now - self._looked
        still = max(stopped, with_sleep - self._slept)
        if still > STOPPED:
            self._away += stopped
            self._still, self._woke = still, now - self._away
        self._looked, self._slept = now, with_sleep
        return now - self._away

    def stood_still(self, within: float) -> float:
        """Seconds for which this process stood still, where that ended within the last so many seconds; else 0."""
        return self._still if self.now() - self._woke < within else 0.0


class Hearing:
    """Since when the other end is silent. Time in which this end stood still does not count: what was said meanwhile still waits
    to be read."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._heard = self._clock.now()

    def hear(self) -> None:
        self._heard = self._clock.now()

    def seconds(self) -> float:
        """Seconds of silence. Must be asked more often than every STOPPED seconds."""
        return self._clock.now() - self._heard
