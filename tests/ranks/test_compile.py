"""Compiled layers compute what the plain ones do, under every kind of engine."""

import pytest

from testing import parity, runs

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "zero2", "zero3", "zero3_hpz", "fsdp2")
AGAIN = "fsdp2 computes again"
COMPILED = ["--torch_compile", "--max_steps", "4"]


def case(strategy, micro, flags):
    named = [*parity.STRATEGIES.get(strategy, []), *flags, "--optim", "sgd"]
    return {
        "name": strategy,
        "strategy": strategy,
        "flags": [*named, "--per_device_train_batch_size", str(micro)],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Losses and norms of one process that compiles nothing, and of compiled runs on one, two and four ranks."""
    alone, two, four = (tmp_path_factory.mktemp(name) for name in ("alone", "two", "four"))
    for folder in (alone, two, four):
        runs.write_inputs(folder)
    plain = case("single", 16, ["--max_steps", "4"])
    compiled = case("single", 16, COMPILED) | {"name": "compiled"}
    found = runs.run_cases(1, [plain, compiled], alone)
    found |= runs.run_cases(4, [case("hsdp", 4, COMPILED)], four)
    again = case("fsdp2", 8, [*COMPILED, "--activation_checkpointing"]) | {"name": AGAIN}
    return found | runs.run_cases(2, [*(case(strategy, 8, COMPILED) for strategy in STRATEGIES), again], two)


@pytest.mark.parametrize("name", ["compiled", *STRATEGIES, AGAIN, "hsdp"])
def test_compiled_layers_equal_plain_ones(name, results):
    differences = parity.worst(results[name], results["single"])
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
