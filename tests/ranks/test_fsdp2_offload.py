"""FSDP2 that keeps its shards in host memory: losses of one process, clipping, resuming, and the model that it saves."""

import pytest
from safetensors.torch import load_file

from testing import marks, parity, run_files, runs

OFFLOAD = ["--accelerate_config", "accelerate_configs/fsdp2_offload_1x4.yaml"]
LESS = ["--max_steps", "4"]
SGD = ["--optim", "sgd"]
WHAT = {
    "plain": SGD,
    "clipped": [*SGD, "--max_grad_norm", "0.5"],
    "adamw": ["--learning_rate", "1e-3"],
    "lora": [*SGD, "--use_peft", "--learning_rate", "2"],
    "resumed": ["--learning_rate", "1e-3", "--save_steps", "2"],
}


def case(what, ranks):
    flags = [*LESS, *WHAT[what], *(OFFLOAD if ranks > 1 else []), "--per_device_train_batch_size", str(16 // ranks)]
    stops = {"stops": [2]} if what == "resumed" and ranks > 1 else {}
    return {"name": f"{what} on {ranks}", "ranks": ranks, "flags": flags} | stops


@pytest.fixture(scope="module")
def results(folder, asked_for):
    """Losses and norms of one process without FSDP2, and of two ranks with it."""
    return runs.run_each([case(what, ranks) for what in sorted(asked_for("what")) for ranks in (1, 2)], folder)


@pytest.mark.parametrize("what", marks.cases(slow=["resumed", "clipped", "lora"], matrix=WHAT))
def test_shards_in_host_memory_change_nothing(what, results, folder):
    parity.assert_equal(results[f"{what} on 2"], results[f"{what} on 1"])
    one, other = map(load_file, run_files.models(folder, f"{what} on 1", f"{what} on 2"))
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() <= 1e-4 for name in one)
