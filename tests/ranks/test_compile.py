"""Compiled layers compute what the plain ones do, under every kind of engine, and are compiled in the first step alone."""

import pytest

from testing import marks, parity, runs

STRATEGIES = ("ddp", "zero2", "zero3", "zero3_hpz", "fsdp2")
AGAIN = "fsdp2 computes again"


def case(name, ranks, *flags):
    shared = ["--max_steps", "4", "--optim", "sgd", "--per_device_train_batch_size", str(runs.GLOBAL_BATCH // ranks)]
    return {"name": name, "ranks": ranks, "flags": [*parity.STRATEGIES.get(name.split()[0], []), *flags, *shared]}


CASES = {
    "compiled": case("compiled", 1, "--torch_compile"),
    **{name: case(name, 2, "--torch_compile") for name in STRATEGIES},
    AGAIN: case(AGAIN, 2, "--torch_compile", "--activation_checkpointing"),
    "hsdp": case("hsdp", 4, "--torch_compile"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """Losses and norms of one process that compiles nothing, and of compiled runs on one, two and four ranks."""
    chosen = [CASES[name] for name in sorted(asked_for("name"))]
    return runs.run_each([case("single", 1), *chosen], tmp_path_factory.mktemp("results"))


# Each takes half a minute.
@pytest.mark.parametrize("name", marks.cases(slow=["zero3"], matrix=CASES))
def test_compiled_layers_equal_plain_ones(name, results):
    parity.assert_equal(results[name], results["single"])
    first, *later = results[name]["programs"]
    assert later == [first] * 3  # though micro-batches differ in length, and one has a single target
