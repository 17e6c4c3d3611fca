"""Waiting for what a busy machine does late, and not for what never ends."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PATIENCE = 900  # seconds that a run may take on a busy machine: a limit against hangs, not a measure


def wait_until(
    condition: Callable[[], Any],
    process: subprocess.Popen[Any] | None = None,
    said: Callable[[], str] = str,
    seconds: float = PATIENCE,
) -> Any:
    """Return what condition() returns once that is true. process: that must live until then; said: what to show otherwise.

    Raises AssertionError after so many seconds, or where the process has ended.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline and (process is None or process.poll() is None), said()
        time.sleep(0.05)
    return found


class LateError(pytest.fail.Exception):
    """Something has taken too long: a failure, which Hypothesis shows with its example, and which no reader catches."""


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Raise LateError in this thread, the main one, where the block takes so many seconds, and again as often as it goes on: what
    the block does at its end may wait too."""

    def ring(*_: object) -> None:
        raise LateError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # pytest-timeout's: a process has one such timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, rest)
