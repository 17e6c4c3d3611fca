"""Each file that an out-of-memory error may name trains a step, in a run of DDP that is given it as it is named."""

import json

import pytest

from testing import remedies, runs
from testing.ranks import run_ranks

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("file", remedies.NAMED)
def test_a_file_that_is_named_trains(file, tmp_path):
    model = runs.write_model(tmp_path / "model of it", "qwen3_moe" if "_ep" in file else "llama")
    flags = [*runs.write_inputs(tmp_path), "--model_name_or_path", str(model), "--from_scratch", "false"]
    flags += ["--max_steps", "1", "--per_device_train_batch_size", "1", "--bf16", "--output_dir", str(tmp_path / "run")]
    ranks = 16 if "2x8" in file else 4
    done = run_ranks("train", *flags, remedies.flag_of(file), file, ranks=ranks, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run/success.json").read_text())["steps"] == 1
