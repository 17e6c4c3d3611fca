"""What the fake GPU finds that a CPU lets pass (testing/fake_gpu/): operands and collectives on the wrong device."""

import json

import pytest

from testing import runs
from testing.gpu_faults import FAULTS
from testing.ranks import run_ranks

pytestmark = pytest.mark.slow
LACKING = "too little memory"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    runs.write_inputs(folder)
    return folder


def broken(fault, folder, *more):
    flags = ["--recipe", str(folder / "full.yaml"), "--max_steps", "1", "--attn_implementation", "varlen"]
    name = "-".join([*fault.split(), *more])
    flags += ["--ds_config", "none", "--output_dir", str(folder / name), *more]
    return run_ranks("testing.gpu_faults", fault, json.dumps(flags), ranks=2, timeout=300, gpus=True)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != LACKING])
def test_a_planted_fault_ends_the_run_by_name(fault, folder):
    done = broken(fault, folder)
    assert done.returncode and FAULTS[fault][1] in done.stdout + done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_too_little_memory_is_told_once_with_what_would_fit(precision, folder):
    done = broken(LACKING, folder, *["--bf16"] * (precision == "bf16"))
    assert done.returncode and "Traceback" not in done.stderr, done.stderr[-3000:]
    lines = done.stderr.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("error on "))
    assert "memory of NVIDIA H100 80GB HBM3, in evaluation (" in lines[first] and " (gpu_faults.py:" in lines[first]
    assert f"  {FAULTS[LACKING][1]}: torch has allocated " in lines[first + 1]
    if precision == "bf16":
        assert "of 79.1 GiB for this run, which fits" in lines[first + 1], lines
        assert (
            "  cure: a smaller per_device_eval_batch_size, or: by its count the same command fits with --"
            in lines[first + 2]
        ), lines
        assert "its segments grow already (PYTORCH_ALLOC_CONF=expandable_segments:True)" in lines[first + 2]
    else:
        assert "the planner cannot say what would fit: " in lines[first + 1] and " computes in fp32" in lines[first + 1]
    assert sum("another rank failed first" in line for line in lines) == 1, "the other rank says one line"
