"""What tests of several hosts share: a short run of the tiny recipe, and what one logged."""

import sys
from pathlib import Path

from .command_line import run_here
from .patience import PATIENCE
from .run_files import losses_of

# Enough to see losses part, and short: importing the libraries takes longer than these steps. No answers: sixteen ranks on
# two cores write three of them for a minute.
STEPS = 4
SHORT = ["--max_steps", str(STEPS), "--logging_steps", "1", "--max_train_samples", "100", "--max_eval_samples", "10"]
SHORT += ["--eval_answers", "0"]
SHORT += ["--report_page", "false"]  # a second of each


def launch_words(hostfile: Path | str, folder: Path, *words: str) -> list[str]:
    """The command that launches the tiny recipe, with its logs and its run in a folder."""
    line = f"python -m brigade launch recipes/tiny/full.yaml --hostfile {hostfile} --log_dir {folder}/logs"
    return [*line.split(), "--output_dir", f"{folder}/run", *words]


def train_alone(flags: list[str], output: Path) -> list[float]:
    """Losses of the tiny recipe on one process of this machine."""
    done = run_here([sys.executable, "train.py", *flags, "--output_dir", output], PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_of(output)
