"""What `launch` shows and keeps: a status line per host, rank 0's output, a log file per rank."""

import os
import queue
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..errors import UserError
from ..errors.console import Losses, console, counted, guard_output
from ..errors.disk import exists
from ..train.host import files

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

LIMIT = 64  # MiB of a log, then a new one is begun
LAUNCH_LOG = "launch.log"  # of a launch without a terminal: what it would print, rank 0's output among it
SHOWN = 12  # hosts with a line of their own; of more, those that stand out
TAIL = 15  # lines of a failed rank that the verdict quotes
PAUSE = 5.0  # seconds between two summaries of many hosts where there is no terminal


class Output:
    """status: host -> words. On a terminal the lines stay below rank 0's output; elsewhere each change is printed, of many
    hosts a summary now and then. Only the user may read the directory and its logs: ranks print samples.
    limit: MiB of one log. Of a longer one three parts are kept: NAME.first.log, NAME.before.log and NAME.log, the newest.
    needed: raise UserError where no log can be written; else the launch goes on without logs
    losses: tells what cannot be written; of a launch of several attempts one for all

    A thread writes: a terminal that is stopped, or a file system that hangs, must not keep launch from its hosts.
    """

    def __init__(
        self,
        hosts: list[str],
        directory: Path,
        limit: float = LIMIT,
        needed: bool = True,
        losses: Losses | None = None,
    ) -> None:
        self.status = dict.fromkeys(hosts, "connecting")
        self.directory, self._limit, self._needed = directory, limit * 2**20, needed
        self._losses = losses or Losses()
        self._tails: dict[str, deque[str]] = {}
        self._live: Live | None = None
        self._width = max(map(len, hosts))
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._without_terminal = False
        self._summed_up, self._due = "", 0.0

    def __enter__(self) -> "Output":
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            if not self._needed:
                self._losses.tell(error)
            else:
                problem = f"no log can be written there: {error.strerror}"
                raise UserError(str(self.directory), problem, "name another --log_dir") from None
        guard_output(errors="replace")  # a rank may print what this terminal cannot show
        self._without_terminal = exists(self.directory / LAUNCH_LOG)
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(
                self._text(), console=console(), refresh_per_second=4, redirect_stdout=True, redirect_stderr=True
            )
            self._live.start()
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._writer.join()
        if self._live:
            self._live.stop()
        with suppress(OSError):  # unless something was started
            self.directory.rmdir()

    def set(self, host: str, words: str) -> None:
        """Set a host's status, and show it."""
        if self.status[host] == words:
            return
        self.status[host] = words
        live = self._live
        if live:
            text = self._text()
            self._work.put(lambda: live.update(text))
        elif len(self.status) <= SHOWN:
            self.say(f"{host:{self._width}}  {words}", sys.stderr)

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print rank 0's output, or words of our own."""
        self._work.put(lambda: self._print(text, stream or sys.stdout))

    def keep(self, name: str, text: str) -> None:
        """Add output to the log file of a rank or launcher."""
        self._tails.setdefault(name, deque(maxlen=TAIL)).extend(text.splitlines())
        self._work.put(lambda: self._append(name, text))

    def path(self, name: str) -> Path:
        return self.directory / f"{name.replace('/', '_')}.log"

    def tail(self, name: str) -> list[str]:
        """The last lines of a rank or launcher."""
        return list(self._tails.get(name, ()))

    def _print(self, text: str, stream: TextIO) -> None:
        print(text, file=stream, flush=True)
        log = os.fstat(stream.fileno()) if self._without_terminal else None
        # The file stays this process's standard output: its older half goes aside.
        if log and log.st_size > self._limit:
            path = self.directory / LAUNCH_LOG
            with files.opened(path) as older, files.replacing(path.with_suffix(".before.log"), secret=True) as copy:
                shutil.copyfileobj(older, copy)
            os.truncate(path, 0)

    def _append(self, name: str, text: str) -> None:
        path = self.path(name)
        try:  # not kept open: 1,000 hosts have 8,000 logs
            with files.append(path, secret=True) as file:
                file.write(f"{text}\n".encode(errors="replace"))
                grown = file.tell()
            if grown > self._limit:
                first = path.with_suffix(".first.log")
                path.rename(path.with_suffix(".before.log") if first.exists() else first)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def _write(self) -> None:
        """Do the thread's work, one piece after the other. A full disk or a closed terminal does not end the run."""
        working = True
        while working:
            try:
                with suppress(queue.Empty):
                    work = self._work.get(timeout=PAUSE)
                    working = work is not None
                    if work:
                        work()
                self._sum_up()
            except OSError as error:
                self._losses.tell(error)

    def _sum_up(self) -> None:
        """Print for many hosts without a terminal how many are how far, when that has changed."""
        if self._live or len(self.status) <= SHOWN or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PAUSE
        states = Counter(list(self.status.values())).most_common()
        words = [f"{words} ({count})" for words, count in states[:4]] + ["..."] * (len(states) > 4)
        summary = "; ".join(words)
        if summary != self._summed_up:
            self._summed_up = summary
            print(f"{counted(len(self.status), 'host')}: {summary}", file=sys.stderr, flush=True)

    def _text(self) -> "Text":
        from rich.text import Text

        hosts = list(self.status)
        if len(hosts) > SHOWN:
            usual, count = Counter(self.status.values()).most_common(1)[0]
            apart = [host for host in hosts if self.status[host] != usual]
            lines = [f"{counted(count, 'host')}: {usual}"]
            lines += [f"{host}  {self.status[host]}" for host in apart[: SHOWN - 1]]
        else:
            lines = [f"{host:{self._width}}  {self.status[host]}" for host in hosts]
        return Text("\n".join(lines), style="dim")
