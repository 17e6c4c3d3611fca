"""Every strategy prints the losses, gradient norms and held-out losses of a single process (benchmarks/parity.py)."""

import ctypes.util

import pytest

from testing import marks, parity, runs

# Every strategy meets every world size and every accumulation; in `make test-matrix` the cheap ones meet more of their
# combinations. The whole product is `python -m benchmarks.parity` (docs/evidence/parity.md). `make test` has each strategy once.
CHEAP = {"ddp", "zero1", "zero2", "fsdp2", "hsdp"}
ALL = {1: (4,), 2: (2,), 4: (1,)}
CHEAP_TOO = {1: (), 2: (1, 4), 4: (4,)}


def wanted(world_size):
    chosen = list(parity.cases(world_size, ALL[world_size]))
    chosen += [case for case in parity.cases(world_size, CHEAP_TOO[world_size]) if case["strategy"] in CHEAP]
    if ctypes.util.find_library("aio") is None:  # CI installs it
        chosen = [case for case in chosen if "nvme" not in case["strategy"]]
    return {case["name"]: case for case in chosen}


CASES = {size: wanted(size) for size in parity.WORLD_SIZES}
# Each strategy, architecture and optimizer once.
OF = {"zero3+deepseek_v3", "fsdp2+gemma3", "ddp+lamb", "fsdp2+lars"}
ONCE = {f"{strategy}-w2-k2" for strategy in parity.STRATEGIES.keys() | OF} | {"hsdp-w4-k1"}


DAMAGED = {
    "name": "damaged",
    "strategy": "ddp",
    "accumulation": 2,
    "damage": True,
    "flags": parity.cases(2, (2,))[0]["flags"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return runs.run_cases(1, parity.references(), tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    names, found = asked_for("name"), {}
    for world_size, known in CASES.items():
        todo = [
            case for name, case in (known | ({"damaged": DAMAGED} if world_size == 2 else {})).items() if name in names
        ]
        if todo:
            found |= runs.run_cases(world_size, todo, tmp_path_factory.mktemp(f"ranks{world_size}"))
    return found


def test_the_reference_learns(reference):
    """A comparison of losses that hardly move would prove nothing."""
    for name, result in reference.items():
        most = 0.9 if name.partition("+")[2] in parity.MODELS else 0.8
        assert result["loss"][-1] < most * result["loss"][0], name
        assert len(result["loss"]) == runs.STEPS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks.size(name in ONCE, case["accumulation"] in ALL[size]))
        for size, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_strategy_equals_one_process(name, reference, results):
    strategy = name.rpartition("-w")[0]
    differences = parity.worst(results[name], reference[parity.reference_of(strategy)])
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences


@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(reference, results):
    differences = parity.worst(results["damaged"], reference["single+sgd"])
    assert differences["grad_norm"] > 100 * parity.TOLERANCE
    assert differences["loss"] > 3 * parity.TOLERANCE
