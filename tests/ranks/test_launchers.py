"""The user's own command lines, from a shell without the environment's bin folder on PATH, train with all their ranks."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from brigade.train.model.tiny import shrink
from testing import marks
from testing.command_line import as_flags
from testing.launch_commands import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SHORT = as_flags(max_steps=3, logging_steps=1, max_train_samples=100, max_eval_samples=10, eval_answers=0)


# One process is the reference of the others; other axes of a file that each launcher hands on: test_parity_*.py
@pytest.mark.parametrize(
    "name",
    marks.cases(
        *("torchrun", "deepspeed", "accelerate-ddp"),
        slow=["python"],
        matrix=COMMANDS,
    ),
)
def test_command_line_trains_with_all_its_ranks(name, tmp_path, reference):
    alone = "python-experts" if name.endswith("experts") else "python"
    of = reference(alone)
    losses = of if name == alone else run(name, tmp_path)
    assert losses == pytest.approx(of, rel=1e-5) and len(losses) == 3


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return cache(lambda name: run(name, tmp_path_factory.mktemp(name)))


def run(name, tmp_path):
    """The losses of that command."""
    words, world_size, strategy = COMMANDS[name]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    config = json.loads((REPOSITORY / "recipes/qwen3-30b-a3b/config.json").read_text())
    (mixture / "config.json").write_text(json.dumps(shrink(config)))
    named = {"HOSTFILE": str(hostfile), "MIXTURE": str(mixture)}
    words = [named.get(word, word) for word in words]
    command = [str(BIN / words[0]), *words[1:], *SHORT, "--output_dir", str(tmp_path / "run")]
    # With a hostfile DeepSpeed asks `ssh FIRST_HOST hostname` before it starts anything, also on one host; that there is
    # no ssh server here is not what is tested (several real hosts are not for a machine without root).
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\nhostname\n")
    ssh.chmod(0o755)
    bare = {
        "PATH": f"{ssh.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": os.environ["HOME"],
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    kept = {key: os.environ[key] for key in ("BRIGADE_CACHE", "TORCH_EXTENSIONS_DIR") if key in os.environ}
    done = subprocess.run(command, cwd=REPOSITORY, env=bare | kept, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert world_size in done.stdout
    assert f"strategy       {strategy} " in done.stdout
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert json.loads((tmp_path / "run" / "success.json").read_text())["steps"] == 3
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
