"""The page of a run that is written while it goes on, and at its end: by `python -m brigade report`, in a process of its own.

What a page costs is the processor's time of that process, at the lowest priority: while the run trains the next one is not begun
before the last one's share of what this host's processors had to give has fallen to SHARE. An error in it is a warning line.
"""

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ...errors.disk import exists
from ..recipe.files import REPOSITORY
from . import events

SHARE = 0.001
LIMIT = 60.0  # seconds that the end of a run waits for its page
FILE = "report.html"


class Pages:
    """The pages of a run that trains, one after another."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None  # that writes one
        self.next = 0.0  # when the next one may begin, by time.monotonic()

    def renew(self, directory: Path) -> None:
        """Begin a new page, unless one is being written or was a moment ago."""
        if self.process:
            self._account(self.process, os.WNOHANG)
        if self.process is None and time.monotonic() >= self.next:
            self.process = _start(directory)
            if self.process:
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self.process.pid, 19)

    def end(self) -> None:
        """End the one that is being written: it knows less than one that comes."""
        if self.process:
            self.process.kill()
            self._account(self.process)

    def _account(self, process: subprocess.Popen[str], options: int = 0) -> None:
        """Wait for the page's process, and let the next one wait by what it cost. options: of waitpid"""
        with suppress(ChildProcessError):  # where the system takes ended children itself, the next page is the end's
            pid, status, used = os.wait4(process.pid, options)
            if pid:
                # Not os.times(), where children are data readers as well.
                self.next = time.monotonic() + (used.ru_utime + used.ru_stime) / SHARE / (os.cpu_count() or 1)
                self.process = None
                process.returncode = os.waitstatus_to_exitcode(status)
                _warn(process)


def write(directory: Path, limit: float = LIMIT) -> bool:
    """Write the page now; whether it is there within `limit` seconds. Any error is a warning line."""
    process = _start(directory)
    if process is None:
        return False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        cure = f"python -m brigade report {shlex.quote(str(directory))}"
        print(f"warning: {directory / FILE} was not written within {limit:.0f} s: {cure} writes it", file=sys.stderr)
        return False
    return _warn(process)


def of_failure(directory: Path, reason: str, limit: float = 20.0) -> None:
    """Note why the run failed, and write its page. Where hosts have directories of their own: on the one that has the run's."""
    if exists(directory / events.FILE):
        events.add(directory, "failed", text=reason)
        write(directory, limit)


def _start(directory: Path) -> subprocess.Popen[str] | None:
    """None where not even a process can be started."""
    command = [sys.executable, "-m", "brigade", "report", str(directory.absolute()), "--page_only"]
    command += ["--html", str(directory.absolute() / FILE)]  # asked for, also where another user began the run
    try:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which then wants its page
        )
    except OSError as error:
        print(f"warning: no page of {directory}: {error}", file=sys.stderr)
        return None


def _warn(process: subprocess.Popen[str]) -> bool:
    """Whether it ended well; else its last words are told."""
    if process.returncode > 0:
        words = " ".join((process.stderr.read() or "it was killed").split()) if process.stderr else ""
        print(f"warning: no page of the run: {words.removeprefix('error: ')[:300]}", file=sys.stderr, flush=True)
    if process.stderr:
        process.stderr.close()
    return process.returncode == 0
