"""Rows in parts over 2 and 4 ranks: the losses, gradient norms and held-out losses of one process (testing/axes_sequence.py)."""

from functools import cache

import pytest

from testing import axes_sequence as cases
from testing import marks, parity, runs

EVERY = {2: list(cases.on(2)), 4: list(cases.on(4))}
DAMAGED = cases.case("ddp", 2, 2, 1, name="damaged", damage=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """results(4): name -> what its case logged. Each number of ranks is started when one of its tests asks."""

    @cache
    def of(world_size):
        names, known = asked_for("name"), [*EVERY[world_size], *[DAMAGED] * (world_size == 2)]
        chosen = [case for case in known if case["name"] in names]
        return runs.run_cases(world_size, chosen, tmp_path_factory.mktemp(f"ranks{world_size}"))

    return of


@pytest.fixture(scope="module")
def references(tmp_path_factory, asked_for):
    chosen = [case for case in (*EVERY[2], *EVERY[4], DAMAGED) if case["name"] in asked_for("name")]
    wanted = {cases.reference_of(case): cases.reference(case["variant"], case["model"]) for case in chosen}
    return runs.run_cases(1, list(wanted.values()), tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    "name",
    marks.cases(
        *("ddp-sp2-w2-k2-plain", "zero3-sp2-w2-k1-packed"),
        # What a rank computes on its part under ZeRO-3 on two ranks; groups of two and of four under FSDP2 and HSDP.
        slow=[
            *(
                f"zero3-sp2-w2-k1-{of}"
                for of in ("clipped", "tiled-checkpointing", "qlora", "lora-tokens", "plain-gemma3", "plain-mistral")
            ),
            *("zero3-sp1-w2-k2-tiled", "fsdp2-sp4-w4-k1-plain", "fsdp2-sp2-w4-k2-packed"),
        ],
        matrix=[case["name"] for case in (*EVERY[2], *EVERY[4])],
    ),
)
def test_divided_sequences_equal_one_process(name, references, results):
    world_size, case = next((size, case) for size, of in EVERY.items() for case in of if case["name"] == name)
    reference = references[cases.reference_of(case)]
    moved = 0.985 if "lora" in case["variant"] else 0.95  # adapters on random weights learn little
    assert len(reference["loss"]) == runs.STEPS and reference["loss"][-1] < moved * reference["loss"][0]
    differences = parity.worst(results(world_size)[name], reference)
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences


@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(references, results):
    differences = parity.worst(results(2)["damaged"], references["single-plain"])
    assert differences["grad_norm"] > 100 * parity.TOLERANCE
    assert differences["loss"] > 3 * parity.TOLERANCE
