"""What the subjects share: their arguments, and the rows that they leave as they go."""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from testing import runs

from .parts import NOT_BEGUN, REPOSITORY, again, end, last_line, start

FEWEST = 20  # seconds for which a run is worth a start


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

    @property
    def ranks(self) -> int:
        """How many ranks the part trains with."""
        return max(ranks for ranks in (1, 2, 4) if ranks <= max(1, self.gpus))

    @property
    def no_time(self) -> str:
        """Why no further run begins; "" where there is time for one."""
        return NOT_BEGUN if self.left < FEWEST else ""

    @property
    def on(self) -> str:
        return "1 GPU" if self.ranks == 1 else f"{self.ranks} GPUs"

    def inputs(self, folder: Path) -> list[str]:
        """Write a tiny model and chats into a folder; return the flags that all runs on them share."""
        # The part `kernels` proves the paths. With `auto` each run would do so again, for its own shapes.
        return [*runs.write_inputs(folder), "--attn_implementation", "sdpa"]

    def row(
        self, what: str, figures: dict[str, Any], fell_short: str = "", command: str = "", left_out: str = ""
    ) -> None:
        """Leave a row. command: what shows it again, where that is not the whole part"""
        row = {"what": what, "figures": figures, "fell_short": fell_short, "left_out": left_out, "command": command}
        row["command"] = row["command"] or again(self.work.name, self.small)
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def command(words: list[str]) -> str:
    """Return a line for a shell in the repository by which its Python, or the host's, runs these words again."""
    inside = Path(sys.executable).is_relative_to(REPOSITORY)
    line = shlex.join([sys.executable if inside else "python3", *words])
    return line.replace(f"{REPOSITORY}/", "")  # a report is for other machines, too


def run(words: list[str], log: Path, seconds: float) -> str:
    """Run a command to its end, and all that it started with it. Returns "" or why it came to nothing.

    log: what it wrote; seconds: it is stopped after
    """
    with log.open("w") as out:
        process, mark = start(words, out)
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} seconds; its last line: {last_line(log)}"
        finally:
            end(mark)
    return f"exit code {code}: {last_line(log)}" if code else ""
