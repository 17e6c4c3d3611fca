"""Rows in parts over 2 and 4 ranks: the losses, gradient norms and held-out losses of one process (testing/axes_sequence.py)."""

import pytest

from testing import axes_sequence as cases
from testing import marks, parity, runs

EVERY = {case["name"]: case for case in (*cases.on(2), *cases.on(4))}
DAMAGED = cases.case("ddp", 2, 2, 1, name="damaged", damage=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """By name, also of the single process that each case is compared with."""
    chosen = [(EVERY | {"damaged": DAMAGED})[name] for name in sorted(asked_for("name"))]
    alone = [cases.reference(case["variant"], case["model"]) for case in chosen]
    return runs.run_each([*alone, *chosen], tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", marks.cases(
    *("ddp-sp2-w2-k2-plain", "zero3-sp2-w2-k1-packed"),
    # What a rank computes on its part under ZeRO-3 on two ranks; groups of two and of four under FSDP2 and HSDP.
    slow=[
        *(
            f"zero3-sp2-w2-k1-{of}"
            for of in ("clipped", "tiled-checkpointing", "qlora", "lora-tokens", "plain-gemma3", "plain-mistral")
        ),
        *("zero3-sp1-w2-k2-tiled", "fsdp2-sp4-w4-k1-plain", "fsdp2-sp2-w4-k2-packed"),
    ],
    matrix=EVERY,
))  # fmt: skip
def test_divided_sequences_equal_one_process(name, results):
    case = EVERY[name]
    reference = results[cases.reference_of(case)]
    moved = 0.985 if "lora" in case["variant"] else 0.95  # adapters on random weights learn little
    assert len(reference["loss"]) == runs.STEPS and reference["loss"][-1] < moved * reference["loss"][0]
    parity.assert_equal(results[name], reference)


@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(results):
    parity.assert_damage_shows(results["damaged"], results["single-plain"])
