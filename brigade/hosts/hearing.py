"""How long the other end of a line has said nothing. Needs only the standard library: agents run it."""

import time

BEAT = 2.0  # seconds: how often each end says that it is there
SILENCE = 60.0  # seconds after which the other end is lost, unless `launch --silence` says otherwise
STOPPED = 5.0  # seconds between two looks at the clock: whoever is later was stopped itself, or its machine stood still


class Hearing:
    """Since when the other end is silent.

    Time in which this process itself was stopped (Ctrl-Z, SIGSTOP, a virtual machine that moves) does not count: what was said
    meanwhile still waits to be read. A laptop's sleep never counts: Linux stops CLOCK_MONOTONIC.
    """

    def __init__(self) -> None:
        self._heard = self._looked = time.monotonic()

    def hear(self) -> None:
        self._heard = time.monotonic()

    def seconds(self) -> float:
        """Seconds of silence. Must be asked more often than every STOPPED seconds."""
        now = time.monotonic()
        if now - self._looked > STOPPED:
            self._heard = min(now, self._heard + now - self._looked)
        self._looked = now
        return now - self._heard
