"""Rows in parts beside tensor groups or stages: one process's losses, gradient norms, held-out losses and model."""

import pytest

from testing import axes_pairs, marks, parity, resume, run_files, runs

CASES = {case["name"]: case for case in (axes_pairs.case(*which) for which in axes_pairs.CASES)}
STOPPED = {"tensor-fsdp2": (axes_pairs.TENSOR, "fsdp2"), "pipeline-zero1": (axes_pairs.PIPELINE, "zero1")}
DAMAGED = axes_pairs.case(axes_pairs.PIPELINE, "zero1", 2, name="damaged", damage=True)


@pytest.fixture(scope="module")
def results(folder, asked_for):
    return runs.run_each([(CASES | {"damaged": DAMAGED})[name] for name in asked_for("name")], folder)


@pytest.fixture(scope="module")
def references(folder, asked_for):
    variants = {CASES[name]["variant"] for name in asked_for("name") if name in CASES} | {"plain"}
    return runs.run_each([axes_pairs.reference(variant) for variant in sorted(variants)], folder)


@pytest.mark.parametrize("name", marks.cases(
    # A row in parts, each of them through two stages, whose optimizer states all four ranks share.
    "sequence 2 x pipeline 2-zero1-k2-packed",
    slow=[
        "tensor 2 x sequence 2-zero3-k1-packed",
        "tensor 2 x sequence 2-fsdp2-k2-lora",
        "sequence 2 x pipeline 2-zero1-k2-clipped",
    ],
    matrix=CASES,
))  # fmt: skip
def test_two_axes_equal_one_process(name, results, references, folder):
    variant = CASES[name]["variant"]
    reference = references[f"single-{variant}"]
    assert reference["loss"][-1] < (0.985 if variant == "lora" else 0.9) * reference["loss"][0]
    parity.assert_equal(results[name], reference)
    run_files.assert_close_models(folder, name, f"single-{variant}")


@pytest.mark.slow
@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(references, results):
    parity.assert_damage_shows(results["damaged"], references["single-plain"])


@pytest.mark.parametrize("which", marks.cases(slow=["pipeline-zero1"], matrix=STOPPED))
def test_a_run_that_died_goes_on_bit_for_bit(which, folder):
    cases = [axes_pairs.case(*STOPPED[which], 2, name=f"{which}{stop}") for stop in ("", "-stopped")]
    for case in cases:
        case["flags"] += ["--optim", "adamw_torch_fused", "--learning_rate", "3e-3"]
    cases[1]["stops"] = resume.STOPS
    resume.assert_same(*runs.run_cases(4, cases, folder).values())
    run_files.assert_same_models(folder, *(case["name"] for case in cases))
