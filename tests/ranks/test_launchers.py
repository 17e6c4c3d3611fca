"""The user's own command lines, from a shell without the environment's bin folder on PATH, train with all their ranks: in a clone
with all rooms deleted but brigade/train and brigade/errors, and as the whole house does."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from brigade.train.model.tiny import shrink
from testing import marks, runs
from testing.command_line import as_flags
from testing.launch_commands import COMMANDS, with_own_port
from testing.ranks import REPOSITORY
from testing.run_files import losses_of

BIN = Path(sys.executable).parent
SHORT = as_flags(max_steps=3, logging_steps=1, max_train_samples=100, max_eval_samples=10, eval_answers=0)
HALL = ["train.py", "brigade/__init__.py", "brigade/gate.py", "brigade/offers.py", "brigade/errors", "brigade/train"]
CONFIGS = ["recipes/tiny", "ds_configs", "accelerate_configs"]


@pytest.fixture(scope="module")
def hall(tmp_path_factory):
    """A copy of this clone that has nothing else."""
    folder = tmp_path_factory.mktemp("hall")
    for name in HALL + CONFIGS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name)  # with what is compiled
        else:
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def reference(hall, tmp_path_factory):
    return cache(lambda name: run(name, tmp_path_factory.mktemp(name), hall))


# Other axes of a file that each launcher hands on: test_parity_*.py. torchrun: test_gpu_lane.py and test_bad_input_launched.py.
@pytest.mark.parametrize("name", marks.cases("deepspeed", "accelerate-ddp", matrix=COMMANDS))
def test_command_line_trains_with_all_its_ranks(name, tmp_path, hall, reference):
    alone = "python-experts" if name.endswith("experts") else "python"
    expected = losses_of(reference(alone))
    found = expected if name == alone else losses_of(run(name, tmp_path, hall))
    assert found == pytest.approx(expected, rel=1e-5) and len(found) == 3


def test_the_hall_trains_as_the_whole_house_does(reference, tmp_path):
    case = {"name": "whole", "flags": [*SHORT, "--output_dir", str(tmp_path / "run")]}
    found, done = runs.run_all(1, [case], tmp_path, timeout=300)
    assert "whole" in found, done.stderr[-3000:]
    assert losses_of(reference("python")) == pytest.approx(losses_of(tmp_path / "run"), rel=1e-5)
    assert (reference("python") / "model.safetensors").is_file()


def run(name, tmp_path, hall):
    """Run that command in the hall; returns its output directory."""
    words, world_size, strategy = COMMANDS[name]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    config = json.loads((REPOSITORY / "recipes/qwen3-30b-a3b/config.json").read_text())
    (mixture / "config.json").write_text(json.dumps(shrink(config)))
    named = {"HOSTFILE": str(hostfile), "MIXTURE": str(mixture)}
    words = with_own_port([named.get(word, word) for word in words])
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
    bare |= {key: os.environ[key] for key in ("BRIGADE_CACHE", "TORCH_EXTENSIONS_DIR") if key in os.environ}
    bare |= {"PYTHONPROFILEIMPORTTIME": "1"} if name == "python" else {}
    done = subprocess.run(command, cwd=hall, env=bare, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert world_size in done.stdout
    assert f"strategy       {strategy} " in done.stdout
    assert json.loads((tmp_path / "run" / "success.json").read_text())["steps"] == 3
    if name == "python":  # which take seconds of each rank, and this run needs none of them
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "torch" in imported and not {"bitsandbytes", "pandas", "torch._inductor.compile_fx"} & imported
    return tmp_path / "run"


# ---- a program of ones own -------------------------------------------------------------------------------------------
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
