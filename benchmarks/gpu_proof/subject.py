"""What the subjects share: their arguments, and the rows that they leave as they go."""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from .parts import end, last_line, start


class Subject:
    """A part's process. gpus: of this host; small: tiny shapes; left: seconds until it would be stopped"""

    def __init__(self, about: str | None) -> None:
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("--rows", type=Path, required=True)
        parser.add_argument("--work", type=Path, required=True)
        parser.add_argument("--seconds", type=float, required=True)
        parser.add_argument("--gpus", type=int, default=0)
        parser.add_argument("--small", action="store_true")
        given = parser.parse_args()
        self.rows, self.work, self.gpus, self.small = given.rows, given.work, given.gpus, given.small
        self._ends = time.monotonic() + given.seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    def row(self, what: str, figures: dict[str, Any], fell_short: str = "", command: str = "") -> None:
        """Leave a row. command: what shows it again, where that is not the whole part"""
        row = {"what": what, "figures": figures, "fell_short": fell_short, "command": command}
        row["command"] = row["command"] or f"make test-gpu ONLY={self.work.name}"
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def run(command: list[str], log: Path, seconds: float) -> str:
    """Run a command to its end, and all that it started with it. Returns "" or why it came to nothing.

    log: what it wrote; seconds: it is stopped after
    """
    with log.open("w") as out:
        process, mark = start(command, out)
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} seconds; its last line: {last_line(log)}"
        finally:
            end(mark)
    return f"exit code {code}: {last_line(log)}" if code else ""
