"""What `launch` shows and keeps: a status line per host, rank 0's output, a log file per rank."""

import sys
from collections import Counter, deque
from pathlib import Path
from typing import IO, Any

SHOWN = 12  # hosts with a line of their own on a terminal; of more, those that stand out
TAIL = 15  # lines of a failed rank that the verdict quotes


class Board:
    """status: host -> words. On a terminal the lines stay below rank 0's output; elsewhere each change is printed."""

    def __init__(self, hosts: list[str], directory: Path) -> None:
        self.status = dict.fromkeys(hosts, "connecting")
        self.directory = directory
        self._files: dict[str, IO[str]] = {}
        self._tails: dict[str, deque[str]] = {}
        self._live: Any = None
        self._width = max(map(len, hosts))

    def __enter__(self) -> "Board":
        self.directory.mkdir(parents=True)
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._text(), refresh_per_second=4, redirect_stdout=True, redirect_stderr=True)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        for file in self._files.values():
            file.close()

    def set(self, host: str, words: str) -> None:
        """A host's new status."""
        if self.status[host] == words:
            return
        self.status[host] = words
        if self._live:
            self._live.update(self._text())
        else:
            print(f"{host:{self._width}}  {words}", file=sys.stderr, flush=True)

    def keep(self, name: str, text: str) -> None:
        """Add output to the log file of a rank or launcher."""
        if name not in self._files:
            self._files[name] = self.path(name).open("a", buffering=1, errors="replace")
            self._tails[name] = deque(maxlen=TAIL)
        print(text, file=self._files[name])
        self._tails[name].extend(text.splitlines())

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def tail(self, name: str) -> list[str]:
        """The last lines of a rank or launcher."""
        return list(self._tails.get(name, ()))

    def say(self, text: str) -> None:
        """Rank 0's output."""
        print(text, flush=True)

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
