"""What the fake GPU finds that a CPU lets pass (testing/fake_gpu/): operands and collectives on the wrong device."""

import json

import pytest

from testing import runs
from testing.gpu_faults import FAULTS
from testing.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    runs.write_inputs(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_ends_the_run_by_name(fault, folder):
    flags = ["--recipe", str(folder / "full.yaml"), "--max_steps", "1", "--attn_implementation", "varlen"]
    flags += ["--ds_config", "none", "--output_dir", str(folder / fault.replace(" ", "-"))]
    done = run_ranks("testing.gpu_faults", fault, json.dumps(flags), ranks=2, timeout=300, gpus=True)
    assert done.returncode and FAULTS[fault][1] in done.stdout + done.stderr, done.stderr[-3000:]
