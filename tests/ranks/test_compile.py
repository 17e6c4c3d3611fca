"""Compiled layers compute what the plain ones do, under every kind of engine and with what else a recipe asks for, and torch
makes no further program once it has seen a run's shapes (docs/evidence/compiled.md)."""

import pytest

from testing import marks, parity, runs
from testing.compiling import ALONE, ENGINES, WITH, case, name_of, reference

CASES = {name_of(strategy, ""): (strategy, "") for strategy in ("single", *ENGINES, *ALONE)}
CASES |= {name_of(strategy, addition): (strategy, addition) for strategy in ("zero3", "fsdp2") for addition in WITH}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """Losses and norms of one process that compiles nothing, and of compiled runs on one, two and four ranks."""
    chosen = [CASES[name] for name in sorted(asked_for("name"))]
    wanted = [reference(addition) for _, addition in chosen] + [case(*each) for each in chosen]
    return runs.run_each(wanted, tmp_path_factory.mktemp("results"))


# Each takes half a minute.
@pytest.mark.parametrize("name", marks.cases(slow=["zero3", "fsdp2, LoRA, recomputing"], matrix=CASES))
def test_compiled_layers_equal_plain_ones(name, results):
    found = results[name]
    parity.assert_equal(found, results[reference(CASES[name][1])["name"]])
    assert found["programs"][0] > 0 and found["programs"][-1] == found["programs"][0], found["programs"]
