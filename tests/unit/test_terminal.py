"""What the commands' output is like where it is no terminal."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAN = [sys.executable, "-m", "brigade", "plan", "recipes/qwen3-8b", "--hostfile", "hostfiles/2x8", "--gpu", "H100"]


def test_a_reader_that_has_read_enough_sees_no_traceback():
    """`... | head -1`: the pipe is closed before the command has printed all."""
    with subprocess.Popen(PLAN, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        said = command.stderr.read().decode()
        assert command.wait() == 1 and said == ""


def test_a_pipe_gets_wide_tables():
    done = subprocess.run(PLAN, cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 0 and "tokens/s/GPU" in done.stdout and "simpler" in done.stdout and "…" not in done.stdout
    )
