"""Label smoothing and z-loss are those of one process under every strategy; NEFTune's noise is of a run, and only in training."""

import pytest

from brigade.train.strategy.axes import Axes
from testing import axes, marks, parity, runs
from testing.ranks import REPOSITORY

TERMS = ["--label_smoothing_factor", "0.1", "--z_loss_coef", "0.001", "--optim", "sgd", "--learning_rate", "0.6"]
NOISE = ["--neftune_noise_alpha", "5", "--optim", "sgd", "--learning_rate", "0.6"]
OWN = ["--token_loss", str(REPOSITORY / "docs/examples/dft.py:loss"), "--optim", "sgd", "--learning_rate", "0.6"]
PLAIN = ["--optim", "sgd", "--learning_rate", "0.6"]


def case(name, ranks=2, *flags, terms=TERMS, **about):
    micro = runs.GLOBAL_BATCH if ranks == 1 else runs.GLOBAL_BATCH // 4  # two micro-batches a step
    return about | {
        "name": name,
        "ranks": ranks,
        "flags": [*flags, *terms, "--per_device_train_batch_size", str(micro)],
    }


ONE = [
    case("one", 1),
    case("plain", 1, terms=PLAIN),
    case("own", 1, terms=OWN),
    case("noise", 1, terms=NOISE),
    case("noise again", 1, terms=NOISE),
]
WAYS = {
    **{name: parity.STRATEGIES[name] for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")},
    "tiled": [*parity.STRATEGIES["fsdp2"], "--tiled_loss", "24"],
    "tensor": axes.flags(Axes(tensor=2), "fsdp2"),
    "sequence": axes.flags(Axes(sequence=2), "zero3"),
    "pipeline": axes.flags(Axes(stages=2), "ddp"),
}
OF_OWN = {f"own {name}": WAYS[name] for name in ("fsdp2", "tensor", "sequence", "pipeline")}
OF_OWN |= {"own zero3": [*WAYS["zero3"], "--tiled_loss", "24"]}
NOISY = {f"noise {name}": WAYS[name] for name in ("zero3", "fsdp2")}
TWO = {
    name: case(name, 2, *flags, terms=terms)
    for ways, terms in ((WAYS, TERMS), (OF_OWN, OWN), (NOISY, NOISE))
    for name, flags in ways.items()
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return runs.run_each(ONE, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory, asked_for):
    names = asked_for("name")
    wanted = [case for name, case in TWO.items() if name in names or name.partition(" ")[0] in names]
    return runs.run_each(wanted, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(
    "name",
    marks.cases("fsdp2", slow=["zero3", "sequence", "pipeline"], matrix=["ddp", "zero1", "zero2", "tiled", "tensor"]),
)
def test_the_terms_are_those_of_one_process(name, one, two):
    parity.assert_equal(two[name], one["one"])


@pytest.mark.parametrize("name", marks.cases("own fsdp2", slow=["own tensor"], matrix=OF_OWN))
def test_a_function_of_ones_own_is_that_of_one_process(name, one, two):
    parity.assert_equal(two[name], one["own"])
    assert one["own"]["loss"][0] < 0.1 < one["plain"]["loss"][0]  # of targets that are as probable as any other token
    assert one["own"]["eval_loss"][0] == one["plain"]["eval_loss"][0]


@pytest.mark.slow
def test_no_loss_of_deepspeeds_own_takes_their_place(tmp_path):
    """It divides the vocabulary of a model with such a plan and tied embeddings, and computes a loss of parts of logits."""
    ways = {1: [], 2: axes.flags(Axes(tensor=2), "zero2")}
    cases = {
        (key, ranks): case(f"{key} on {ranks}", ranks, *ways[ranks], terms=terms, model="gpt_neox-tied", group="tied")
        for key, terms in {"terms": TERMS, "own": OWN, "plain": PLAIN}.items()
        for ranks in ways
    }
    found = runs.run_each([*cases.values()], tmp_path)
    for key in ("terms", "own", "plain"):
        parity.assert_equal(found[f"{key} on 2"], found[f"{key} on 1"])


def test_the_terms_raise_the_training_loss_and_leave_the_held_out_loss_what_it_is(one):
    assert one["one"]["loss"][0] > one["plain"]["loss"][0] + 0.005
    assert one["one"]["eval_loss"][0] == one["plain"]["eval_loss"][0]


def test_noise_is_of_the_run_and_only_in_training(one):
    noise, again, plain = (one[name] for name in ("noise", "noise again", "plain"))
    assert noise["loss"] == again["loss"] and noise["loss"][0] != plain["loss"][0]
    assert noise["loss"][0] == pytest.approx(plain["loss"][0], rel=0.02)
    assert noise["eval_loss"][0] == plain["eval_loss"][0]


@pytest.mark.slow
@pytest.mark.cases(name="noise")
def test_ranks_draw_the_same_noise_whatever_shards_the_weights(two):
    assert two["noise zero3"]["loss"] == pytest.approx(two["noise fsdp2"]["loss"], rel=parity.TOLERANCE)
