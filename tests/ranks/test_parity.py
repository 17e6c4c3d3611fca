"""Every strategy prints the losses, gradient norms and held-out losses of a single process (benchmarks/parity.py)."""

import pytest

from testing import marks, parity, runs

# Each strategy with one accumulation on each number of ranks, and the light ones with others; the whole product is
# `python -m benchmarks.parity` (docs/evidence/parity.md).
ONE_EACH = {1: (2,), 2: (2,), 4: (1,)}
FURTHER = {1: (4,), 2: (1, 4), 4: (4,)}
LIGHT = {"ddp", "zero1", "zero2", "fsdp2", "hsdp"}


def cases_on(world_size):
    cases = parity.cases(world_size, ONE_EACH[world_size])
    cases += [case for case in parity.cases(world_size, FURTHER[world_size]) if case["strategy"] in LIGHT]
    return {case["name"]: case for case in cases}


CASES = {size: cases_on(size) for size in parity.WORLD_SIZES}
EVERY = {name: case for of_size in CASES.values() for name, case in of_size.items()}
EVERY["damaged"] = parity.cases(2, (2,))[0] | {"name": "damaged", "damage": True}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return runs.run_cases(1, parity.references(), tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    return runs.run_each([EVERY[name] for name in asked_for("name")], tmp_path_factory.mktemp("results"))


def test_the_reference_learns(reference):
    """A comparison of losses that hardly move would prove nothing."""
    for name, result in reference.items():
        most = 0.95 if name.partition("+")[2] in parity.MODELS else 0.9
        assert result["loss"][-1] < most * result["loss"][0], name
        assert len(result["loss"]) == runs.STEPS


@pytest.mark.parametrize("name", marks.cases(
    # Each strategy, architecture and optimizer. NVMe is in the matrix everywhere: its kernel is compiled for four minutes.
    *(f"{strategy}-w2-k2" for strategy in parity.STRATEGIES if strategy not in ("hsdp", "zero3_nvme")),
    *("zero3+deepseek_v3-w2-k2", "fsdp2+gemma3-w2-k2", "ddp+lamb-w2-k2", "fsdp2+lars-w2-k2", "hsdp-w4-k1"),
    # On one rank and on four each kind of engine; offloaded states on one, groups in a host on four.
    slow=[
        *(f"{strategy}-w1-k2" for strategy in ("zero2_offload", "zero3", "fsdp2")),
        *(f"{strategy}-w4-k1" for strategy in ("zero2", "zero3_hpz", "fsdp2")),
        *("zero3+gemma3-w2-k2", "fsdp2+deepseek_v3-w2-k2", "fsdp2+lamb-w2-k2"),
    ],
    matrix=[name for name in EVERY if name != "damaged"],
))  # fmt: skip
def test_strategy_equals_one_process(name, reference, results):
    strategy = name.rpartition("-w")[0]
    parity.assert_equal(results[name], reference[parity.reference_of(strategy)])


@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(reference, results):
    parity.assert_damage_shows(results["damaged"], reference["single+sgd"])
