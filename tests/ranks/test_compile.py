"""Compiled layers compute what the plain ones do, under every kind of engine."""

import pytest

from testing import marks, parity, runs

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
def results(tmp_path_factory, asked_for):
    """Losses and norms of one process that compiles nothing, and of compiled runs on one, two and four ranks."""
    names = asked_for("name")
    compiled = {1: [case("single", 16, ["--max_steps", "4"]), case("single", 16, COMPILED) | {"name": "compiled"}]}
    compiled[2] = [case(strategy, 8, COMPILED) for strategy in STRATEGIES]
    compiled[2] += [case("fsdp2", 8, [*COMPILED, "--activation_checkpointing"]) | {"name": AGAIN}]
    compiled[4] = [case("hsdp", 4, COMPILED)]
    found = {}
    for ranks, cases in compiled.items():
        if wanted := [each for each in cases if each["name"] in {*names, "single"}]:
            folder = tmp_path_factory.mktemp(f"ranks{ranks}")
            runs.write_inputs(folder)
            found |= runs.run_cases(ranks, wanted, folder)
    return found


# Each takes half a minute.
@pytest.mark.parametrize("name", marks.cases(slow=["zero3"], matrix=["compiled", AGAIN, *STRATEGIES, "hsdp"]))
def test_compiled_layers_equal_plain_ones(name, results):
    differences = parity.worst(results[name], results["single"])
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
