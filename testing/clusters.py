"""What tests of several hosts share: a short run of the tiny recipe, and what one logged."""

import sys
from pathlib import Path

from .command_line import run_here
from .run_files import losses_of

# Enough to see losses part, and short: importing the libraries takes longer than these steps. No answers: sixteen ranks on
# two cores write three of them for a minute.
STEPS = 4
SHORT = ["--max_steps", str(STEPS), "--logging_steps", "1", "--max_train_samples", "100", "--max_eval_samples", "10"]
SHORT += ["--eval_answers", "0"]
PATIENCE = 900  # seconds that a run may take on a busy machine: a limit against hangs, not a measure


def train_alone(flags: list[str], output: Path) -> list[float]:
    """Losses of the tiny recipe on one process of this machine."""
    done = run_here([sys.executable, "train.py", *flags, "--output_dir", output], PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_of(output)
