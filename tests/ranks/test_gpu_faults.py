"""What the fake GPU finds that a CPU lets pass (testing/fake_gpu/): operands and collectives on the wrong device."""

import json

import pytest

from testing import remedies, runs
from testing.gpu_faults import FAULTS
from testing.ranks import run_ranks

pytestmark = pytest.mark.slow
LACKING, EVALUATING = "too little memory", "too little memory in evaluation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    runs.write_inputs(folder)
    return folder


def command(fault, folder, *more):
    flags = ["--recipe", str(folder / "full.yaml"), "--max_steps", "1", "--attn_implementation", "varlen"]
    name = "-".join([*fault.split(), *more])
    return [*flags, "--ds_config", "none", "--output_dir", str(folder / name), *more]


def broken(fault, folder, *more):
    flags = json.dumps(command(fault, folder, *more))
    return run_ranks("testing.gpu_faults", fault, flags, ranks=2, timeout=300, gpus=True)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in (LACKING, EVALUATING)])
def test_a_planted_fault_ends_the_run_by_name(fault, folder):
    done = broken(fault, folder)
    assert done.returncode and FAULTS[fault][1] in done.stdout + done.stderr, done.stderr[-3000:]


def told(fault, folder, *more):
    """The three lines of the rank that lacks memory first; the other one says one line at most."""
    done = broken(fault, folder, *more)
    assert done.returncode and "OutOfMemoryError" not in done.stderr, done.stderr[-3000:]
    lines = done.stderr.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("error on "))
    assert sum("another rank failed first" in line for line in lines) <= 1  # none where it was ended before it noticed
    assert f"  {FAULTS[fault][1]}: torch holds " in lines[first + 1]
    return lines[first : first + 3]


def test_too_little_memory_is_told_once_with_what_would_fit_and_each_way_trains(folder):
    more = ("--bf16", "--optim", "lamb")  # which no ZeRO takes, so that FSDP2 is what shards
    place, problem, cure = told(LACKING, folder, *more)
    assert "memory of NVIDIA H100 80GB HBM3, in forward at step 1 (gpu_faults.py:" in place
    assert "of 80.0 GiB for this run, which fits" in problem
    assert cure.startswith("  cure: by its count the same command fits with --")
    assert cure.endswith("are on already, against fragmentation (PYTORCH_ALLOC_CONF=expandable_segments:True)")
    ways = remedies.ways_of(cure)
    assert any("--accelerate_config accelerate_configs/fsdp2" in way for way in ways), cure
    flags = [remedies.in_the_command(way, command(LACKING, folder, *more)) for way in ways]
    assert flags[0].count("--output_dir") == 1, "the first goes on in the run's own directory"
    # The others are alternatives: each takes the same new directory, as if the one before had not.
    again = [
        {"name": f"way {number}", "flags": [*each, *["--fresh"] * (number > 0)]} for number, each in enumerate(flags)
    ]
    trained, done = runs.run_all(2, again, folder, 300, gpus=True)
    assert len(trained) == len(ways) >= 2, done.stderr[-3000:]
    assert all(any("loss" in entry for entry in each["log"]) for each in trained.values())


def test_too_little_memory_that_the_planner_cannot_judge_is_told_with_the_reason(folder):
    _, problem, _ = told(LACKING, folder)
    assert "the planner cannot say what would fit: " in problem and " computes in fp32" in problem


def test_in_an_evaluation_only_what_helps_there_is_named(folder):
    place, problem, cure = told(EVALUATING, folder, "--bf16")
    assert ", in evaluation (gpu_faults.py:" in place and "planner" not in problem
    assert "--per_device_eval_batch_size" in cure or "a strategy that shards more" in cure
