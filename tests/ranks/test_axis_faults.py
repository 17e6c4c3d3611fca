"""A rank of a run that an axis divides is killed in mid-step: `launch` names it, starts again from the last checkpoint, and the
run ends with exactly what an undisturbed run logs. Of data parallelism: tests/cluster/test_faults.py, on several hosts."""

import re
import sys

import pytest

from brigade.train.strategy.axes import Axes
from testing import axes, marks, resume, run_files, runs
from testing.command_line import as_flags, run_here
from testing.train_command import FAULTS, nothing_left

# axes -> (their sizes, kind of strategy, ranks, model). Rank 1 is killed, on two ranks in the last stage, on four in the first.
CASES = {
    "pipeline": (Axes(stages=2), "ddp", 2, None),
    "pipeline x tensor": (Axes(stages=2, tensor=2), "zero1", 4, None),
    "pipeline x data": (Axes(stages=2), "zero1", 4, None),
    "tensor, FSDP2": (Axes(tensor=2), "fsdp2", 2, None),
    "tensor, AutoTP": (Axes(tensor=2), "zero2", 2, None),
    "sequence": (Axes(sequence=2), "zero3", 2, None),
    "expert": (Axes(experts=2), "fsdp2", 2, "qwen3_moe"),
}
SHORT = as_flags(max_steps=6, save_steps=2, eval_steps=6, async_save=False, per_device_train_batch_size=4)
LIMIT = 600  # seconds on a busy machine: against hangs


@pytest.mark.parametrize("axis", marks.cases(slow=["pipeline"], matrix=CASES))
def test_a_run_whose_rank_is_killed_ends_with_the_losses_of_an_undisturbed_one(axis, tmp_path):
    over, kind, ranks, model = CASES[axis]
    case = {"name": "whole", "flags": [*resume.SHARED, *axes.flags(over, kind), *SHORT], "model": model}
    whole = runs.run_cases(ranks, [case], tmp_path)["whole"]
    assert len(whole["loss"]) == 6 and whole["eval_loss"]

    run, hosts = tmp_path / "run", tmp_path / "hosts"
    hosts.write_text(f"localhost slots={ranks}\n")
    words = f"--hostfile {hosts} --log_dir {tmp_path}/logs --restarts 1 --restart_pause 0 --no_check --output_dir {run}"
    flags = runs.prepared(case, tmp_path, runs.write_inputs(tmp_path, runs.STEPS))["flags"]
    command = [sys.executable, "-m", "brigade", "launch", *flags[1:], *words.split()]
    killed = tmp_path / "killed"
    there = {"PYTHONPATH": str(FAULTS), "BRIGADE_TEST_FAULT": "killed-in-fourth", "BRIGADE_TEST_FAILED_AT": str(killed)}
    with nothing_left(patience=2) as mark:
        done = run_here(command, LIMIT, BRIGADE_TEST_MARK=mark, **there)

    said = done.stdout + done.stderr
    assert done.returncode == 0 and killed.exists(), said
    assert said.count("failed first: killed by signal 9 (SIGKILL)\n") == 1, said
    assert "error: localhost, rank 1 failed first: killed by signal 9 (SIGKILL)\n" in said, said
    assert "newest checkpoint: step 2: 1 step lost" in said and re.search(
        rf"continues\s+from\s+{run}/checkpoint-2\b", said
    ), said
    assert run_files.figures(run_files.history(run), *whole) == whole
