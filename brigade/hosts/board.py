"""What `launch` shows and keeps: a status line per host, rank 0's output, a log file per rank."""

import queue
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from ..errors import UserError

SHOWN = 12  # hosts with a line of their own on a terminal; of more, those that stand out
TAIL = 15  # lines of a failed rank that the verdict quotes


class Board:
    """status: host -> words. On a terminal the lines stay below rank 0's output; elsewhere each change is printed.

    A thread writes: a terminal that is stopped, or a file system that hangs, must not keep launch from its hosts.
    """

    def __init__(self, hosts: list[str], directory: Path) -> None:
        self.status = dict.fromkeys(hosts, "connecting")
        self.directory = directory
        self._files: dict[str, IO[str]] = {}
        self._tails: dict[str, deque[str]] = {}
        self._live: Any = None
        self._width = max(map(len, hosts))
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._trouble = False

    def __enter__(self) -> "Board":
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(str(self.directory), f"no log can be written there: {error.strerror}",
                            "name another --log_dir") from None  # fmt: skip
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")  # a rank may print what this terminal cannot show
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._text(), refresh_per_second=4, redirect_stdout=True, redirect_stderr=True)
            self._live.start()
        self._writer.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._work.put(None)
        self._writer.join()
        if self._live:
            self._live.stop()
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        if not self._files:  # nothing was started
            with suppress(OSError):
                self.directory.rmdir()

    def set(self, host: str, words: str) -> None:
        """A host's new status."""
        if self.status[host] == words:
            return
        self.status[host] = words
        if self._live:
            text = self._text()
            self._work.put(lambda: self._live.update(text))
        else:
            self.say(f"{host:{self._width}}  {words}", sys.stderr)

    def say(self, text: str, stream: Any = None) -> None:
        """Rank 0's output, or words of our own."""
        self._work.put(lambda: print(text, file=stream or sys.stdout, flush=True))

    def keep(self, name: str, text: str) -> None:
        """Add output to the log file of a rank or launcher."""
        self._tails.setdefault(name, deque(maxlen=TAIL)).extend(text.splitlines())
        self._work.put(lambda: self._append(name, text))

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def tail(self, name: str) -> list[str]:
        """The last lines of a rank or launcher."""
        return list(self._tails.get(name, ()))

    def _append(self, name: str, text: str) -> None:
        if name not in self._files:
            self._files[name] = self.path(name).open("a", buffering=1, errors="replace")
        print(text, file=self._files[name])

    def _write(self) -> None:
        """The thread: one piece of work after the other. A full disk or a closed terminal does not end the run."""
        while work := self._work.get():
            try:
                work()
            except OSError as error:
                if not self._trouble:
                    self._trouble = True
                    with suppress(OSError):
                        print(
                            f"some output is lost from here on: {error}; the run goes on", file=sys.stderr, flush=True
                        )

    def _text(self) -> Any:
        from rich.text import Text

        hosts = list(self.status)
        if len(hosts) > SHOWN:
            usual, count = Counter(self.status.values()).most_common(1)[0]
            apart = [host for host in hosts if self.status[host] != usual]
            lines = [f"{count} hosts: {usual}", *(f"{host}  {self.status[host]}" for host in apart[: SHOWN - 1])]
        else:
            lines = [f"{host:{self._width}}  {self.status[host]}" for host in hosts]
        return Text("\n".join(lines), style="dim")
