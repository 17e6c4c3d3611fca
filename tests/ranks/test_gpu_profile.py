"""On a fake GPU: traced steps, recorded memory, noise on embeddings and z-loss run where CUDA's branches are taken."""

import json
import sys
from pathlib import Path

import pytest

from testing.command_line import as_flags, run_here


@pytest.mark.slow
def test_steps_are_traced_beside_noise_and_z_loss(tmp_path):
    few = {"max_steps": 3, "eval_answers": 0, "max_train_samples": 100, "max_eval_samples": 10, "report_page": False}
    asked = {"neftune_noise_alpha": 5, "z_loss_coef": 0.001, "profile": "{start: 2, steps: 1, memory: true}"}
    words = as_flags(
        recipe="recipes/tiny/full.yaml", output_dir=str(tmp_path / "run"), attn_implementation="sdpa", **few, **asked
    )
    torchrun = [Path(sys.executable).with_name("torchrun"), *["--nproc_per_node", "1", "--master_port", "29641"]]
    command = [sys.executable, "-m", "testing.fake_gpu", "--gpus", "1", *torchrun, "train.py", *words]
    done = run_here(command, 200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (traced,) = [line for line in events if line["event"] == "profile"]
    assert traced["step"] == 2 and traced["parts"]["computing"] > 0
