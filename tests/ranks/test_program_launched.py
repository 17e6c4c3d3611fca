"""A program of one's own under `launch`: its callback ends the run on both ranks, and launch calls it a success."""

import json
import os
import subprocess
import sys

import pytest

from testing import marks, runs
from testing.ranks import REPOSITORY


# What the others are started with: tests/unit/test_program.py. That deepspeed then trains: tests/cluster/test_launch.py.
@pytest.mark.parametrize("launcher", marks.cases(slow=["torchrun"], matrix=["deepspeed"]))
def test_launch_starts_a_program_with_a_callback_on_all_ranks(tmp_path, launcher):
    example = (REPOSITORY / "docs/examples/stop_at_loss.py").read_text()
    (tmp_path / "own.py").write_text(example.replace("StopAtLoss(2.0)", "StopAtLoss(99.0)"))
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    recipe, output = runs.write_inputs(tmp_path)[-1], tmp_path / "run"
    words = ["launch", "--script", "own.py", recipe, "--hostfile", "hosts", "--launcher", launcher, "--no_check"]
    words += ["--logging_steps", "2", "--log_dir", str(tmp_path / "logs"), "--output_dir", str(output)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "brigade", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((output / "success.json").read_text())["steps"] == 2
    assert str(tmp_path / "own.py") in (output / "run.yaml").read_text()
