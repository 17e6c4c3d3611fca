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

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SHORT = as_flags(max_steps=3, logging_steps=1, max_train_samples=100, max_eval_samples=10, eval_answers=0)

EXPERTS = "accelerate_configs/fsdp2_ep2_1x4.yaml"
MIXTURE = ["--recipe", "recipes/tiny/full.yaml", "--model_name_or_path", "MIXTURE"]  # of experts, tiny

COMMANDS = {
    "python": (["python", "train.py"], "world size 1", "single"),
    "python-zero3": (["python", "train.py", "--ds_config", "ds_configs/zero3.json"], "world size 1", "zero3"),
    "torchrun": (["torchrun", "--nproc_per_node", "2", "train.py"], "world size 2", "ddp"),
    "deepspeed": (
        ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", "ds_configs/zero3.json"], "world size 2", "zero3"),
    "deepspeed-hostfile": (
        ["deepspeed", "--hostfile", "HOSTFILE", "train.py", "--deepspeed", "ds_configs/zero2.json"],
        "world size 2", "zero2"),
    "accelerate-ddp": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/ddp_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "ddp"),
    "accelerate-fsdp2": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "fsdp2"),
    "accelerate-zero3": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/zero3_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "zero3"),
    "accelerate-hsdp": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/hsdp_1x4.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 4", "hsdp"),
    "python-experts": (["python", "train.py", *MIXTURE], "world size 1", "single"),
    "accelerate-fsdp2-experts": (
        ["accelerate", "launch", "--config_file", EXPERTS, "train.py", "--accelerate_config", EXPERTS, *MIXTURE],
        "world size 4", "fsdp2 x expert 2"),
    "accelerate-fsdp2-tp2": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_tp2_1x4.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 4", "fsdp2"),
    "deepspeed-tp2": (
        ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", "ds_configs/zero1_tp2.json"], "world size 2", "zero1_tp2"),
    "accelerate-fsdp2-sp2": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_sp2_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "fsdp2"),
    "deepspeed-sp2": (
        ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", "ds_configs/zero3_sp2.json"], "world size 2", "zero3_sp2"),
}  # fmt: skip


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
