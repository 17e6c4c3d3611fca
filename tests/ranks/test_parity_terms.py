"""Label smoothing and z-loss are those of one process under every strategy; NEFTune's noise is of a run, and only in training."""

import pytest

from brigade.train.strategy.axes import Axes
from testing import axes, marks, parity, runs
from testing.ranks import REPOSITORY

TERMS = ["--label_smoothing_factor", "0.1", "--z_loss_coef", "0.001", "--optim", "sgd", "--learning_rate", "0.6"]
NOISE = ["--neftune_noise_alpha", "5", "--optim", "sgd", "--learning_rate", "0.6"]
OWN = ["--token_loss", str(REPOSITORY / "docs/examples/dft.py:loss"), "--optim", "sgd", "--learning_rate", "0.6"]
OTHERS = ["zero3", "tensor", "sequence", "pipeline"]
PLAIN = ["--optim", "sgd", "--learning_rate", "0.6"]


def case(name, ranks=2, *flags, terms=TERMS):
    micro = runs.GLOBAL_BATCH if ranks == 1 else runs.GLOBAL_BATCH // 4  # two micro-batches a step
    return {"name": name, "flags": [*flags, *terms, "--per_device_train_batch_size", str(micro)]}


ONE = [
    case("one", 1),
    case("plain", 1, terms=PLAIN),
    case("own", 1, terms=OWN),
    case("noise", 1, terms=NOISE),
    case("noise again", 1, terms=NOISE),
]
TWO = {
    each["name"]: each
    for each in [
        *(case(name, 2, *parity.STRATEGIES[name]) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
        case("tiled", 2, *parity.STRATEGIES["fsdp2"], "--tiled_loss", "24"),
        case("tensor", 2, *axes.flags(Axes(tensor=2), "fsdp2")),
        case("sequence", 2, *axes.flags(Axes(sequence=2), "zero3")),
        case("pipeline", 2, *axes.flags(Axes(stages=2), "ddp")),
        case("own fsdp2", 2, *parity.STRATEGIES["fsdp2"], terms=OWN),
        case("own zero3", 2, *parity.STRATEGIES["zero3"], "--tiled_loss", "24", terms=OWN),
        case("own tensor", 2, *axes.flags(Axes(tensor=2), "fsdp2"), terms=OWN),
        case("own sequence", 2, *axes.flags(Axes(sequence=2), "zero3"), terms=OWN),
        case("own pipeline", 2, *axes.flags(Axes(stages=2), "ddp"), terms=OWN),
        case("noise zero3", 2, *parity.STRATEGIES["zero3"], terms=NOISE),
        case("noise fsdp2", 2, *parity.STRATEGIES["fsdp2"], terms=NOISE),
    ]
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return runs.run_cases(1, ONE, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory, asked_for):
    names = asked_for("name")
    wanted = [case for name, case in TWO.items() if name in names or name.partition(" ")[0] in names]
    return runs.run_cases(2, wanted, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(
    "name",
    marks.cases("fsdp2", slow=["zero3", "sequence", "pipeline"], matrix=["ddp", "zero1", "zero2", "tiled", "tensor"]),
)
def test_the_terms_are_those_of_one_process(name, one, two):
    differences = parity.worst(two[name], one["one"])
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences


@pytest.mark.parametrize(
    "name", marks.cases("own fsdp2", slow=["own tensor"], matrix=[f"own {name}" for name in OTHERS])
)
def test_a_function_of_ones_own_is_that_of_one_process(name, one, two):
    differences = parity.worst(two[name], one["own"])
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
    assert one["own"]["loss"][0] < 0.1 < one["plain"]["loss"][0]  # of targets that are as probable as any other token
    assert one["own"]["eval_loss"][0] == one["plain"]["eval_loss"][0]


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
