"""Compiled layers compute what the plain ones do, under every kind of engine (docs/evidence/compiled.md)."""

import pytest

from testing import marks, parity, runs
from testing.compiling import ALONE, ENGINES, case, name_of, reference

CASES = {
    name_of(*each): each for each in [(name, "") for name in ("single", *ENGINES, *ALONE)] + [("fsdp2", "recomputing")]
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """Losses and norms of one process that compiles nothing, and of compiled runs on one, two and four ranks."""
    chosen = [CASES[name] for name in sorted(asked_for("name"))]
    wanted = [reference(addition) for _, addition in chosen] + [case(*each) for each in chosen]
    return runs.run_each(wanted, tmp_path_factory.mktemp("results"))


# Each takes half a minute.
@pytest.mark.parametrize("name", marks.cases(slow=["zero3"], matrix=CASES))
def test_compiled_layers_equal_plain_ones(name, results):
    parity.assert_equal(results[name], results[reference(CASES[name][1])["name"]])
    assert results[name]["programs"][0], "torch has compiled nothing"
