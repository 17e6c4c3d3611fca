"""What docs/evidence/architectures.md says of a run, and how it is laid out."""

import pytest

from benchmarks import architectures, architectures_tables

LOG = [{"loss": 2.0, "grad_norm": 1.0}, {"eval_loss": 3.0}]


def of(loss):
    return {"log": [{"loss": loss, "grad_norm": 1.0}, {"eval_loss": 3.0}], "said": ""}


@pytest.mark.parametrize("loss, rounding, expected", [
    (2.0 * (1 + 9e-6), 0, "equal"),
    (2.0 * (1 + 2e-5), 0, "differs"),
    (2.0 * (1 + 2e-5), 1e-5, "equal"),  # as far as it is from itself in smaller micro-batches
    (2.0 * (1 + 2e-4), 1e-1, "differs"),  # which excuses no more than 1e-4
])  # fmt: skip
def test_a_difference_is_held_to_what_rounding_moves(loss, rounding, expected):
    row = architectures.verdict(of(loss), of(2.0), rounding)
    assert row["verdict"] == expected and row["difference"] == pytest.approx(abs(loss - 2) / 2)


@pytest.mark.parametrize("result, verdict, why", [
    ({"refused": "error in here\n  it has no heads\n  cure: none"}, "refused", "it has no heads"),
    ({"failed": "Traceback\nRuntimeError: a size\nends here"}, "fails", "RuntimeError: a size"),
    ({"failed": "error on vm, rank 0 of 1: a flag\n  a mean\n  cure: another model"}, "refused", "a mean"),
    ({"log": LOG, "said": "samples   padded: nothing tells it\n"}, "trains", "padded: nothing tells it"),
])  # fmt: skip
def test_a_run_without_anything_to_compare_it_with(result, verdict, why):
    assert architectures.verdict(result, None) == {"verdict": verdict, "difference": None, "why": why}


def row(verdict, why="", difference=None):
    return {"verdict": verdict, "why": why, "difference": difference, "machine": "here", "versions": "torch 2"}


ROWS = {
    ("ab_text", "builds"): row("builds"),
    ("ab_text", "one process"): row("trains", "end to end: and so on"),
    ("ab_text", "DDP"): row("differs", difference=3e-4),
    ("cd", "builds"): row("builds"),
    ("cd", "one process"): row("trains", "padded: nothing tells it"),
    ("cd", "DDP"): row("refused", "heads of cd and of CdConfig"),
    ("ef", "builds"): row("builds"),
    ("ef", "one process"): row("trains"),
    ("ef", "DDP"): row("refused", "heads of /tmp/x/ef and of EfConfig"),
    ("gg", "builds"): row("builds"),
    ("gg", "one process"): row("refused", "it is an encoder"),
    ("gg", "DDP"): row("refused", "it is an encoder"),
    ("gh", "builds"): row("fails", "an encoder and a decoder"),
}


def test_the_page_has_a_line_for_each_type_that_can_be_built_and_each_reason_once():
    tables = architectures_tables.tables(ROWS, ["one process", "DDP"])
    assert tables["architectures"].splitlines()[2:] == [
        "| `ab_text` | end to end | **3e-04** |",
        "| `cd` | padded | no |",
        "| `ef` | yes | no |",
    ]
    assert tables["architectures-count"].splitlines()[2:] == [
        "| builds | 4 | 0 | 0 | 1 |",
        "| one process | 3 | 0 | 1 | 0 |",
        "| DDP | 0 | 1 | 3 | 0 |",
    ]
    reasons = tables["architectures-why"].splitlines()[2:]
    assert "| DDP | heads of it and of it | `cd`, `ef` |" in reasons and len(reasons) == 4
    assert tables["architectures-measured"] == "5 types of config, measured on here; torch 2."
