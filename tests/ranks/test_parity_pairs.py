"""Rows in parts beside tensor groups or stages: one process's losses, gradient norms, held-out losses and model."""

import pytest
import torch
from safetensors.torch import load_file

from testing import axes_pairs, marks, parity, resume, runs

CASES = {case["name"]: case for case in (axes_pairs.case(*which) for which in axes_pairs.CASES)}
STOPPED = {"tensor-fsdp2": (axes_pairs.TENSOR, "fsdp2"), "pipeline-zero1": (axes_pairs.PIPELINE, "zero1")}
DAMAGED = axes_pairs.case(axes_pairs.PIPELINE, "zero1", 2, name="damaged", damage=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def results(folder, asked_for):
    """DeepSpeed keeps AutoTP's groups until its process ends, so these have processes of their own."""
    names, found = asked_for("name"), {}
    known = [case for name, case in (CASES | {"damaged": DAMAGED}).items() if name in names]
    for auto in (True, False):
        todo = [case for case in known if ("tensor" in case["name"] and "zero" in case["name"]) == auto]
        if todo:
            found |= runs.run_cases(4, todo, folder)
    return found


@pytest.fixture(scope="module")
def references(folder, asked_for):
    variants = {CASES[name]["variant"] for name in asked_for("name") if name in CASES} | {"plain"}
    return runs.run_cases(1, [axes_pairs.reference(variant) for variant in sorted(variants)], folder / "one")


@pytest.mark.parametrize(
    "name",
    marks.cases(
        # A row in parts, each of them through two stages, whose optimizer states all four ranks share.
        "sequence 2 x pipeline 2-zero1-k2-packed",
        slow=[
            "tensor 2 x sequence 2-zero3-k1-packed",
            "tensor 2 x sequence 2-fsdp2-k2-lora",
            "sequence 2 x pipeline 2-zero1-k2-clipped",
        ],
        matrix=CASES,
    ),
)
def test_two_axes_equal_one_process(name, results, references, folder):
    variant = CASES[name]["variant"]
    reference = references[f"single-{variant}"]
    assert reference["loss"][-1] < (0.985 if variant == "lora" else 0.9) * reference["loss"][0]
    differences = parity.worst(results[name], reference)
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
    ours, theirs = (
        load_file(next(place.glob("*model.safetensors")))
        for place in (folder / "outputs" / name, folder / "one" / "outputs" / f"single-{variant}")
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype == theirs[key].dtype
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(references, results):
    differences = parity.worst(results["damaged"], references["single-plain"])
    assert differences["grad_norm"] > 100 * parity.TOLERANCE
    assert differences["loss"] > 3 * parity.TOLERANCE


@pytest.mark.parametrize("which", marks.cases(slow=["pipeline-zero1"], matrix=STOPPED))
def test_a_run_that_died_goes_on_bit_for_bit(which, folder):
    cases = [axes_pairs.case(*STOPPED[which], 2, name=f"{which}{stop}") for stop in ("", "-stopped")]
    for case in cases:
        case["flags"] += ["--optim", "adamw_torch_fused", "--learning_rate", "3e-3"]
    cases[1]["stops"] = resume.STOPS
    whole, stopped = runs.run_cases(4, cases, folder).values()
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert stopped[figure] == whole[figure] and len(whole[figure]) > 2
    one, other = (load_file(folder / "outputs" / case["name"] / "model.safetensors") for case in cases)
    assert all(torch.equal(value, other[key]) for key, value in one.items())
