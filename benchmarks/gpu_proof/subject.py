"""What the subjects share: their arguments, and the rows that they leave as they go."""

import argparse
import functools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testing import parity, runs

from .parts import NOT_BEGUN, REPOSITORY, again, end, last_line, start, why_it_ended

FEWEST = 20  # seconds for which a run is worth a start
NO_EVALUATION = ("--eval_steps", "99", "--max_eval_samples", "1")  # but those before and after a run
PRODUCTS = """\
from brigade.train.watch.slow_ranks import GPU, seconds_of_a_product
seconds = seconds_of_a_product()
print(2 * GPU[1] ** 3 / seconds if seconds else 0.0)
"""
STOPPED = "stopped after"


class Subject:
    """A part's process. gpus: of this host; small: tiny shapes; left: seconds until it should end

    longer: times its usual limit that it has, and that a single run of it may take
    """

    def __init__(self, about: str | None) -> None:
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("--rows", type=Path, required=True)
        parser.add_argument("--work", type=Path, required=True)
        parser.add_argument("--until", type=float, required=True, help="of time.monotonic()")
        parser.add_argument("--gpus", type=int, default=0)
        parser.add_argument("--longer", type=float, default=1.0)
        parser.add_argument("--small", action="store_true")
        given = parser.parse_args()
        self.rows, self.work, self.gpus, self.small = given.rows, given.work, given.gpus, given.small
        self.longer = given.longer
        self._until = given.until
        self._whole = self.left

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    @property
    def ranks(self) -> int:
        """How many ranks the part trains with."""
        return max(ranks for ranks in (1, 2, 4) if ranks <= max(1, self.gpus))

    @property
    def no_time(self) -> str:
        """Why no further run begins; "" where there is time for one."""
        return NOT_BEGUN if self.left < FEWEST else ""

    @functools.cached_property
    def no_bf16(self) -> str:
        """Why no run in bf16 begins: this GPU only emulates it, and train.py refuses that; "" where it has it."""
        import torch

        has = torch.cuda.is_bf16_supported(including_emulation=False)
        return "" if has else f"{torch.cuda.get_device_name()} has no bf16"

    @functools.cached_property
    def speed(self) -> float:
        """The operations per second of this GPU's products of matrices in bf16, which no run exceeds; 0: unknown."""
        if self.no_bf16:
            return 0.0
        # In a process that ends: one that has computed keeps memory of the GPU that the runs would lack.
        done = subprocess.run([sys.executable, "-c", PRODUCTS], cwd=REPOSITORY, capture_output=True, text=True)
        return 0.0 if done.returncode else float(done.stdout.split()[-1])

    def too_slow(self, operations: float) -> str:
        """Why a run of so many floating-point operations does not begin: its products alone take longer than there is time."""
        from brigade.report.facts import duration

        least = operations / self.speed if self.speed else 0.0
        if least <= self.left:
            return ""
        return f"too slow: its products alone take {duration(least)}, and {duration(self.left)} are left"

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those of which a part measures each."""
        return ("zero3",) if self.small else ("zero3", "fsdp2", "ddp")

    def flags(self, name: str, output: Path) -> list[str]:
        """Return the flags of a run by one of the strategies: in bf16, or fp32 without it, and without evaluations."""
        flags = [*parity.STRATEGIES[name], "--output_dir", str(output), "--fresh", *NO_EVALUATION]
        return [*flags, "--bf16", "false" if self.no_bf16 else "true"]

    @property
    def on(self) -> str:
        return "1 GPU" if self.ranks == 1 else f"{self.ranks} GPUs"

    def run(self, words: list[str], name: str) -> tuple[str, str]:
        """Run a command to its end, its log in the part's folder. Returns why it fell short, and why it is left out: what had
        less than half of the part's time, and was stopped at its end, was cut off."""
        seconds = self.left
        failed = run([sys.executable, *words], self.work / f"{name}.log", seconds)
        late = failed.startswith(STOPPED) and seconds < self._whole / 2
        return ("", f"cut off: {failed}") if late else (failed, "")

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


def torchrun(ranks: int, *words: str) -> list[str]:
    """Return the words, behind Python's name, that start so many ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *words]


def in_ranks(asked: str, function: Callable[[Path, list[str]], None]) -> bool:
    """In a rank that was started with `asked` FOLDER FLAGS, call a function with them. Returns whether this process is one."""
    if asked not in sys.argv:
        return False
    from brigade.train.distributed.ranks import run_to_the_end

    at = sys.argv.index(asked)
    run_to_the_end(lambda: function(Path(sys.argv[at + 1]), sys.argv[at + 2 :]))
    return True


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
            return f"{STOPPED} {seconds:.0f} seconds; its last line: {last_line(log)}"
        finally:
            end(mark)
    return f"exit code {code}: {why_it_ended(log)}" if code else ""
