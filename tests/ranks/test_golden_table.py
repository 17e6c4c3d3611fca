"""The table by which versions are compared (make test-versions) is what this revision computes with the pinned ones."""

import pytest

from benchmarks import golden as command
from benchmarks.pages import read
from brigade.errors import versions
from testing import golden

RUNS = ("single+sgd", "fsdp2-w2-k2", "qwen3_moe, full, 2 ranks, fsdp2 x expert 2, accumulation 2")
ELSEWHERE = 1e-5  # on another processor, which adds up in another order


def test_the_table_has_every_run_and_those_that_are_made_again_are_as_it_says(tmp_path):
    table = command.table()
    assert table.keys() == {case["name"] for case in golden.cases(tmp_path / "inputs")}
    found, failed = golden.measured(tmp_path / "runs", *RUNS)
    assert not failed and found.keys() == {*RUNS}
    if versions.not_pinned(versions.of_this_process()):
        pytest.skip("the table is of the pinned versions")
    for name in RUNS:
        assert not golden.difference(found[name], table[name], ELSEWHERE), name
    assert "expert_balance" in table[RUNS[-1]] and len(table[RUNS[0]]["loss"]) == golden.STEPS


def test_the_table_says_with_which_versions_it_was_made():
    (made,) = {row["versions"] for row in read(command.TABLE)}
    for name in ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets"):
        said = made.partition(f"{name} ")[2].partition(",")[0]
        assert versions.meets(said, versions.pins()[name]), f"{name}: make the table anew (CONTRIBUTING.md)"
