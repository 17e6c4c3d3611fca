"""FSDP2 that keeps its shards in host memory: losses of one process, clipping, resuming, and the model that it saves."""

import pytest
from safetensors.torch import load_file

from testing import marks, parity, runs

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
    strategy = OFFLOAD if ranks > 1 else []
    case = {"name": what, "flags": [*LESS, *WHAT[what], *strategy, "--per_device_train_batch_size", str(16 // ranks)]}
    return case | ({"stops": [2]} if what == "resumed" and ranks > 1 else {})


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """(ranks -> their losses, ranks -> their folder) of one process without FSDP2, and of two ranks with it."""
    found, folders = {}, {}
    for ranks in (1, 2):
        folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        found[ranks] = runs.run_cases(ranks, [case(what, ranks) for what in asked_for("what")], folders[ranks])
    return found, folders


@pytest.mark.parametrize("what", marks.cases(slow=["resumed", "clipped", "lora"], matrix=WHAT))
def test_shards_in_host_memory_change_nothing(what, results):
    found, folders = results
    differences = parity.worst(found[2][what], found[1][what])
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
    file = "adapter_model.safetensors" if what == "lora" else "model.safetensors"
    one, other = (load_file(folders[ranks] / "outputs" / what / file) for ranks in (1, 2))
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() <= 1e-4 for name in one)
