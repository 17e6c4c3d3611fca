"""Every form of activation checkpointing computes what a run without it does, under every kind of engine."""

import pytest

from testing import marks, parity, runs

FORMS = {"all": "true", "every": "{every_n: 2}", "selective": "selective", "offload": "offload"}
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
LESS = ["--max_steps", "4", "--optim", "sgd"]
LORA = ["--use_peft", "--learning_rate", "2"]
PACKED = ["--packing", "--padding_free"]
TILED = ["--tiled_loss", "7", "--tiled_mlp", "9"]
OTHERS = {"lora": LORA, "packed": PACKED, "tiled": TILED, "dropout": [*LORA, "--lora_dropout", "0.3"]}
PAIRS = [
    f"{form}-{strategy}" for form in FORMS for strategy in STRATEGIES if (form, strategy) != ("selective", "zero3")
]
NAMES = [*PAIRS, *(f"{pair}-{other}" for pair in PAIRS for other in OTHERS)]


def case(name, ranks=2):
    """FORM-STRATEGY-OTHER, of which each may be left out behind the first. One process, whose form is none, computes the rows of
    a step at once, packed in two halves."""
    form, strategy, other = [*name.split("-"), "", "", ""][:3]
    micro = 4 if ranks == 2 else 8 if other == "packed" else 16
    flags = [*LESS, "--per_device_train_batch_size", str(micro), *parity.STRATEGIES.get(strategy, [])]
    flags += ["--activation_checkpointing", FORMS[form]] if form in FORMS else []
    return {"name": name, "ranks": ranks, "flags": [*flags, *OTHERS.get(other, [])]}


def alone(name):
    """The run that a case is compared with: of one process and without tiles, which change no loss. What dropout drops depends on
    the rank, so it is compared with the same ranks."""
    if name.endswith("-dropout"):
        return case("-".join(["none", *name.split("-")[1:]]))
    other = name.split("-")[2] if name.count("-") == 2 else ""
    return case("none-single" + (f"-{other}" if other not in ("", "tiled") else ""), 1)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """Losses and norms of one process that computes nothing again, and of runs on two ranks that do."""
    names = sorted(asked_for("name"))
    return runs.run_each([*map(alone, names), *map(case, names)], tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", marks.cases(matrix=NAMES))
def test_recomputed_activations_change_nothing(name, results):
    parity.assert_equal(results[name], results[alone(name)["name"]])
