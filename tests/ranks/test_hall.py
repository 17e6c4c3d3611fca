"""A clone with all rooms deleted but brigade/train and brigade/errors trains under every launcher as the whole house does."""

import json
import os
import shutil
import subprocess

import pytest

from testing import marks, runs
from testing.command_line import as_flags
from testing.ranks import REPOSITORY
from testing.train_command import BIN, free_port

HALL = ["train.py", "brigade/__init__.py", "brigade/offers.py", "brigade/errors", "brigade/train"]
CONFIGS = ["recipes/tiny", "ds_configs", "accelerate_configs"]
SHORT = as_flags(max_steps=4, logging_steps=1, max_train_samples=100, max_eval_samples=10, eval_answers=0)
LAUNCHERS = {
    "python": ["python", "train.py"],
    "torchrun": ["torchrun", "--standalone", "--nproc_per_node", "2", "train.py"],
    "deepspeed": [
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        "PORT",
        "train.py",
        "--ds_config",
        "ds_configs/zero3.json",
    ],
    "accelerate": [
        *["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_1x2.yaml", "--main_process_port", "PORT"],
        "train.py",
    ],
}


@pytest.fixture(scope="module")
def hall(tmp_path_factory):
    """A copy of this clone that has nothing else."""
    folder = tmp_path_factory.mktemp("hall")
    for name in HALL + CONFIGS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the whole house logs on one process."""
    folder = tmp_path_factory.mktemp("whole")
    case = {"name": "whole", "flags": [*SHORT, "--output_dir", str(folder / "run")]}
    found, done = runs.run_all(1, [case], folder, timeout=300)
    assert "whole" in found, done.stderr[-3000:]
    return losses(folder / "run")


def losses(output):
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.mark.parametrize("launcher", marks.cases("python", slow=["torchrun", "deepspeed", "accelerate"]))
def test_the_hall_trains_without_any_other_room(launcher, hall, whole, tmp_path):
    program, *words = (str(free_port()) if word == "PORT" else word for word in LAUNCHERS[launcher])
    command = [str(BIN / program), *words, *SHORT, "--output_dir", str(tmp_path / "run")]
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPROFILEIMPORTTIME": "1"} if launcher == "python" else {}
    done = subprocess.run(command, cwd=hall, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert len(whole) == 4 and losses(tmp_path / "run") == pytest.approx(whole, rel=1e-5)
    assert (tmp_path / "run" / "model.safetensors").is_file()
    if launcher == "python":  # torch's compiler takes each rank a second, and this run compiles nothing
        assert " torch" in done.stderr and "torch._inductor.compile_fx" not in done.stderr
