"""Every form of activation checkpointing computes what a run without it does, under every kind of engine."""

import pytest

from testing import marks, parity, runs

FORMS = {"every": "{every_n: 2}", "selective": "selective", "offload": "offload"}
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
LESS = ["--max_steps", "4", "--optim", "sgd"]
LORA = ["--use_peft", "--learning_rate", "2"]
PACKED = ["--packing", "--padding_free"]
TILED = ["--tiled_loss", "7", "--tiled_mlp", "9"]
OTHERS = {"lora": LORA, "packed": PACKED, "tiled": TILED}
PAIRS = [
    f"{form}-{strategy}" for form in FORMS for strategy in STRATEGIES if (form, strategy) != ("selective", "zero3")
]
NAMES = [*PAIRS, *(f"{pair}-{other}" for pair in PAIRS for other in OTHERS)]


def case(name, micro):
    """`single`, or FORM-STRATEGY-OTHER, of which each may be left out behind the first."""
    form, strategy, other = [*name.split("-"), "", "", ""][:3]
    flags = [*LESS, "--per_device_train_batch_size", str(micro), *parity.STRATEGIES.get(strategy, [])]
    flags += ["--activation_checkpointing", FORMS[form]] if form in FORMS else []
    return {"name": name, "flags": [*flags, *OTHERS.get(other, [])]}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """Losses and norms of one process that computes nothing again, and of runs on one and two ranks that do."""
    names = asked_for("name")
    others = {"", *(name.split("-")[2] for name in names if name.count("-") == 2)} - {"tiled"}
    alone = [case("-".join(["none", "single", other]).rstrip("-"), 16 if other != "packed" else 8) for other in others]
    alone += [case(name, 16) for name in names if "single" in name]
    found = runs.run_cases(1, alone, tmp_path_factory.mktemp("ranks1"))
    two = [case(name, 4) for name in names if "single" not in name]
    return found | (runs.run_cases(2, two, tmp_path_factory.mktemp("ranks2")) if two else {})


@pytest.mark.parametrize("name", marks.cases(matrix=NAMES))
def test_recomputed_activations_change_nothing(name, results):
    other = name.split("-")[2] if name.count("-") == 2 else ""
    reference = results["none-single" + (f"-{other}" if other not in ("", "tiled") else "")]
    differences = parity.worst(results[name], reference)
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
