"""docs/evidence/parity.md beyond data parallelism: what was measured is all that trains, and as exact as promised."""

import math

import pytest

from benchmarks import pages, parity_axes, parity_cases
from benchmarks.parity_cases import DAMAGED, NAMES, PLAN, RANKS
from brigade.train.engines import choose_engine
from testing import parity

ROWS = pages.read(parity_axes.RESULTS)


def measured(axis):
    return {(row["strategy"].partition(",")[0], int(row["ranks"])) for row in ROWS if row["axis"] == axis}


@pytest.mark.parametrize("axis", PLAN)
def test_every_case_of_the_page_was_measured(axis, tmp_path):
    wanted = [
        (case.axis, str(case.ranks), case.divided, case.strategy, case.method, case.covers)
        for ranks in RANKS
        for case in parity_cases.cases(axis, ranks, tmp_path)
    ]
    found = [tuple(row[key] for key in (*parity_axes.OF_A_ROW, "covers")) for row in ROWS if row["axis"] == axis]
    assert sorted(found) == sorted(wanted)


def test_losses_and_norms_are_those_of_one_process():
    for row in ROWS:
        differences = [float(row[key]) for key in parity_axes.FIGURES]
        if row["covers"] == DAMAGED:  # and this is seen
            assert float(row["grad_norm"]) > 100 * parity.TOLERANCE, row
        else:
            assert all(math.isfinite(each) and each <= parity.TOLERANCE for each in differences), row


@pytest.mark.parametrize(
    "axis, kinds", [("tensor", {*choose_engine.TENSOR, "ddp"}), ("sequence", choose_engine.DATA.keys() - {"single"})]
)
def test_every_strategy_that_an_axis_runs_under_was_measured_on_2_4_and_8_ranks(axis, kinds):
    """But HSDP where ranks make no two groups, of two tensor groups each: brigade/train/strategy/axis_rules.py."""
    least = {"tensor": 8, "sequence": 4}[axis]
    wanted = {(NAMES[kind], ranks) for kind in kinds for ranks in RANKS if kind != "hsdp" or ranks >= least}
    assert measured(axis) == wanted
