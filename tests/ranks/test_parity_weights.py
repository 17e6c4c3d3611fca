"""Weights of samples give the losses of one process under every strategy; weights of 1, and rows of weight 0, change nothing."""

import json

import pytest

from brigade.train.strategy.axes import Axes
from testing import axes, marks, parity, runs

WEIGHTS = (0, 0.25, 1, 3.5)
SGD = ["--optim", "sgd", "--learning_rate", "0.6"]
TERMS = ["--label_smoothing_factor", "0.1", "--z_loss_coef", "0.001"]
PACKED = ["--packing", "true", "--max_length", "128"]
# name -> the run of one process that it is compared with, where that is another than "weighed"
REFERENCE = {"sequence": "terms", "pipeline": "terms", "packed": "packed", "terms": "terms"}
OTHERS = ["ddp", "fsdp2", "zero2", "sequence", "pipeline", "tensor", "padded", "packed", "terms"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """name -> flags that train on these rows: as they are, all of weight 1, of several weights, and without those of weight 0."""
    folder = tmp_path_factory.mktemp("rows")
    runs.write_inputs(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    weighed = [row | {"weight": WEIGHTS[number % len(WEIGHTS)]} for number, row in enumerate(rows)]
    sets = {"ones": [row | {"weight": 1} for row in rows], "weighed": weighed}
    sets["some"] = [row for row in weighed if row["weight"]]
    for name, content in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    flags = {name: ["--train_file", str(folder / f"{name}.jsonl"), "--columns", "{weight: weight}"] for name in sets}
    return flags | {"plain": []}


def case(name, flags, micro=4, ranks=1):
    return {"name": name, "ranks": ranks, "flags": [*SGD, "--per_device_train_batch_size", str(micro), *flags]}


@pytest.fixture(scope="module")
def one(files, tmp_path_factory, asked_for):
    whole = {name: ["--global_batch_size", str(size)] for name, size in (("weighed", 67), ("some", 50))}
    cases = [
        *(case(name, files[name], 16) for name in ("plain", "ones", "weighed")),
        *(case(f"whole {name}", [*files[name], *flags], 5) for name, flags in whole.items()),
    ]
    others = {"packed": PACKED, "terms": TERMS}
    needed = {REFERENCE[name] for name in asked_for("name") if name in REFERENCE}
    cases += [case(name, [*files["weighed"], *others[name]], 16) for name in sorted(needed)]
    return runs.run_cases(1, cases, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(files, tmp_path_factory, asked_for):
    of = parity.STRATEGIES
    ways = {name: of[name] for name in ("ddp", "zero2", "zero3", "fsdp2")}
    ways |= {
        "tensor": axes.flags(Axes(tensor=2), "fsdp2"),
        "sequence": [*axes.flags(Axes(sequence=2), "zero3"), *TERMS],
        "pipeline": [*axes.flags(Axes(stages=2), "ddp"), *TERMS],
        "padded": [*of["zero2"], "--padding_free", "false"],
        "packed": [*of["fsdp2"], *PACKED],
        "terms": [*of["zero3"], *TERMS, "--tiled_loss", "24"],
    }
    names = asked_for("name")
    cases = [case(name, [*files["weighed"], *flags]) for name, flags in ways.items() if name in names]
    return runs.run_cases(2, cases, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", marks.cases(slow=["zero3"], matrix=OTHERS))
def test_the_weights_are_those_of_one_process(name, one, two):
    parity.assert_equal(two[name], one[REFERENCE.get(name, "weighed")])


@pytest.mark.slow
def test_weights_of_one_give_the_losses_of_no_weights_to_the_bit(one):
    assert one["ones"] == one["plain"]


@pytest.mark.slow
def test_rows_of_weight_zero_are_rows_left_out(one):
    parity.assert_equal(one["whole weighed"], one["whole some"])


@pytest.mark.slow
def test_weights_change_the_training_loss_and_not_the_held_out_one(one):
    assert abs(one["weighed"]["loss"][0] - one["plain"]["loss"][0]) > 0.001
    assert one["weighed"]["eval_loss"][0] == one["plain"]["eval_loss"][0]


@pytest.mark.slow
def test_no_loss_of_deepspeeds_own_takes_their_place(files, tmp_path):
    """It divides the vocabulary of a model with such a plan and tied embeddings, and computes a loss of parts of logits."""
    own = {"model": "gpt_neox-tied", "group": "tied"}
    ways = {1: files["weighed"], 2: [*files["weighed"], *axes.flags(Axes(tensor=2), "zero2")]}
    found = runs.run_each([case(f"on {ranks}", flags, ranks=ranks) | own for ranks, flags in ways.items()], tmp_path)
    parity.assert_equal(found["on 2"], found["on 1"])
