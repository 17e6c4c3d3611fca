"""A rank that hangs, is stopped or dies in mid-step: the others do not wait for ever, and say whose fault it is."""

import json
import os
import re
import signal
import sys

import pytest

from brigade.train.run import events
from brigade.train.strategy.axes import Axes
from testing import axes, marks, resume, run_files, runs
from testing.command_line import as_flags, run_here
from testing.ranks import run_ranks
from testing.run_files import losses_of
from testing.train_command import FAULTS, launched, nothing_left

TIMEOUT = "5"  # seconds of silence within a step of milliseconds
STAGES = axes.flags(Axes(stages=2), "ddp")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    shared = runs.write_inputs(tmp_path_factory.mktemp("inputs"))
    return [*shared, "--max_steps", "6", "--save_steps", "1", "--eval_answers", "0", "--hang_timeout", TIMEOUT]


def train(flags, output, ranks=4):
    return run_ranks("testing.hanging", *flags, "--output_dir", str(output), ranks=ranks, timeout=120)


@pytest.mark.parametrize("axis", [[], pytest.param(STAGES, marks=pytest.mark.slow)], ids=["data", "pipeline"])
def test_a_rank_that_sleeps_in_its_data_loader_is_named(axis, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_TEST_FAULT", "sleeping-data")
    done = train([*flags, *axis], tmp_path)
    assert done.returncode == 1
    assert "rank 1 on " in done.stderr and " has waited in data loading since step 3; " in done.stderr, done.stderr
    assert "; ranks 0, 2-3 wait for it in " in done.stderr
    assert "sleep" in (tmp_path / "heartbeats" / "rank-1.stacks").read_text()
    waiting = json.loads((tmp_path / "heartbeats" / "rank-2.collectives").read_text())["fr"]["entries"]
    assert not waiting[-1]["retired"], "the collective in which rank 2 waits"
    (fault,) = (event for event in events.read(tmp_path) if event["event"] == "fault")
    assert fault["kind"] == "hang" and "rank 1" in fault["text"] and fault["step"] == 3


# That the verdict knows a pipeline's ranks: above.
@pytest.mark.parametrize("axis", [
    pytest.param([], marks=pytest.mark.slow, id="data"),
    pytest.param(STAGES, marks=pytest.mark.matrix, id="pipeline"),
])  # fmt: skip
def test_a_rank_that_is_stopped_is_named_and_does_not_stay_behind(axis, flags, tmp_path):
    """torchrun waits 30 seconds for a process that hears no SIGTERM; ours ends it at once."""
    command = [*launched("torchrun"), "train.py", *flags, *axis, "--output_dir", tmp_path]
    done = run_here(command, 180, BRIGADE_TEST_FAULT="stopped", PYTHONPATH=str(FAULTS), OMP_NUM_THREADS="1")
    assert done.returncode == 1
    said = r"rank 1 on \S+ has been stopped \(SIGSTOP, or a debugger\) since step \d; rank 0 waits for it in"
    assert re.search(said, done.stderr), done.stderr
    assert re.search(said, done.stderr.partition("Root Cause")[2]), "torchrun names the cause, too"
    pid = json.loads((tmp_path / "heartbeats" / "rank-1.json").read_text())["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Else the checkpoint of the step before may still be on its way when a rank is killed.
AT_ONCE = ["--async_save", "false"]


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train([*flags, *AT_ONCE], output, 2).returncode == 0
    return output


@pytest.mark.slow
@pytest.mark.parametrize("when", ["killed-in-forward", "killed-in-optimizer"])
def test_a_rank_that_is_killed_in_mid_step_costs_that_step_alone(when, flags, undisturbed, tmp_path, monkeypatch):
    broken, flags = tmp_path / "broken", [*flags, *AT_ONCE]
    monkeypatch.setenv("BRIGADE_TEST_FAULT", when)
    done = train(flags, broken, 2)
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in broken.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    monkeypatch.delenv("BRIGADE_TEST_FAULT")
    again = train(flags, broken, 2)
    assert again.returncode == 0, again.stderr
    assert losses_of(broken) == losses_of(undisturbed)


@pytest.mark.slow
def test_a_slow_rank_is_reported_with_its_host(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_TEST_FAULT", "slow-forward")
    done = train([*flags, "--max_steps", "24", "--save_steps", "null"], tmp_path, 2)
    assert done.returncode == 0, done.stderr
    (slow,) = (event for event in events.read(tmp_path) if event["event"] == "slow")
    assert slow["rank"] == 1 and slow["score"] < 0.7 and "forward pass" in slow["why"]
    assert f"rank 1 on {slow['host']} is slow, score " in done.stdout


# ---- under an axis ---------------------------------------------------------------------------------------------------
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
