"""Tensor parallelism prints the losses, gradient norms and held-out losses of a single process, and saves its model."""

import json

import pytest
import torch
from safetensors.torch import load_file

from testing import axes, marks, parity, runs

PLAIN = {(strategy, ranks, k) for strategy in axes.STRATEGIES for ranks, k in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))}
VARIED = (
    {
        ("fsdp2_tp2", 4, 2, variant)
        for variant in ("qwen2", "qwen3", "gemma3_text", "phi", "packing", "lora", "clip", "adamw", *axes.ADAPTERS)
    }
    | {("ddp_tp2", 2, 2, model) for model in axes.LINEAR_ATTENTION}
    | {("zero1_tp2", 2, 2, "lora-norms")}
    | {("fsdp2_tp2", 4, 2, "tiled"), ("fsdp2_tp2", 4, 2, "tiled-tied"), ("ddp_tp2", 4, 2, "tiled")}
    | {("fsdp2_tp2", 4, 2, "ends"), ("zero1_tp2", 2, 2, "ends")}
    | {("ddp_tp2", 4, 2, variant) for variant in ("packing", "lora", "clip", "qdora")}
    | {
        (strategy, 2, 2, variant)
        for strategy in ("zero1_tp2", "zero3_tp2")
        for variant in ("qwen2", "qwen3", "gemma3_text", "phi", "packing", "clip", "adamw", "lora")
    }
    | {("fsdp2_tp2", 4, 2, model) for model in axes.OUTSIDE_THE_PLAN + axes.SPLIT_INPUTS}
    | {(strategy, 2, 2, model) for strategy in ("zero1_tp2", "zero3_tp2") for model in axes.OUTSIDE_THE_PLAN}
    | {("zero1_tp2", 2, 2, model) for model in axes.SPLIT_INPUTS}
    | {(strategy, 4, 2, "lora") for strategy in ("zero1_tp2", "zero2_tp2", "zero3_tp2")}
)
CASES = {case["name"]: case for case in (axes.case(*which) for which in sorted(PLAIN | VARIED, key=str))}
DAMAGED = axes.case("zero1_tp2", 2, 2) | {"name": "damaged", "damage": True}


def variant(name):
    return name.partition("+")[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2, 4)}


@pytest.fixture(scope="module")
def reference(folders, asked_for):
    wanted = {variant(name) for name in asked_for("name")}
    return runs.run_cases(1, [axes.reference(of) for of in sorted(wanted - {"damaged"} | {""})], folders[1])


@pytest.fixture(scope="module")
def results(folders, asked_for):
    names, found = asked_for("name"), {}
    for ranks in (2, 4):
        known = [case for name, case in (CASES | {"damaged": DAMAGED}).items() if name in names]
        todo = [case for case in known if case["name"] == "damaged" or f"-w{ranks}-" in case["name"]]
        todo = [case for case in todo if ranks == 2 or case["name"] != "damaged"]
        if todo:
            found |= runs.run_cases(ranks, todo, folders[ranks])
    return found


@pytest.mark.parametrize(
    "name",
    marks.cases(
        "zero1_tp2-w2-k2+apertus",  # norms of each head, and parameters outside the plan
        "zero3_tp2-w2-k2",  # what ZeRO-3 has sharded before AutoTP divides it
        slow=[
            "zero3_tp2-w4-k2",
            *(f"fsdp2_tp2-w4-k2+{of}" for of in ("gemma3_text", "tiled-tied", "packing", "qdora")),
            "zero1_tp2-w2-k2+phi3",
            "zero3_tp2-w2-k2+clip",
            "ddp_tp2-w2-k2+qwen3_5_text",  # whose layers read the weights of a convolution by themselves
        ],
        matrix=CASES,
    ),
)
def test_tensor_parallelism_equals_one_process(name, reference, results, folders):
    known = reference[f"single+{variant(name)}"]
    differences = parity.worst(results[name], known)
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences
    assert known["loss"][-1] < 0.99 * known["loss"][0]
    ranks = 2 if "-w2-" in name else 4
    ours, theirs = (
        load_file(next((folders[of] / "outputs" / run).glob("*model.safetensors")))
        for of, run in ((ranks, name), (1, f"single+{variant(name)}"))
    )
    assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {
        key: (value.shape, value.dtype) for key, value in theirs.items()
    }
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-5)


@pytest.mark.cases(name="damaged")
@pytest.mark.slow
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(reference, results):
    differences = parity.worst(results["damaged"], reference["single+"])
    assert differences["grad_norm"] > 100 * parity.TOLERANCE
    assert differences["loss"] > 3 * parity.TOLERANCE


@pytest.mark.slow
def test_answers_are_those_of_one_process(tmp_path_factory):
    """A tied head gives each of AutoTP's ranks the logits of its own tokens alone."""
    given = {}
    for ranks, cases in ((1, [axes.reference()]), (2, [axes.case(strategy, 2, 1) for strategy in axes.STRATEGIES])):
        folder = tmp_path_factory.mktemp(f"answers{ranks}")
        shared = runs.write_inputs(folder)
        few = ["--eval_answers", "3", "--max_steps", "4", "--eval_steps", "4"]
        for case in cases:
            case["flags"] = [*shared, *case["flags"], *few, "--output_dir", str(folder / "outputs" / case["name"])]
        found, done = runs.run_all(ranks, cases, folder, 600, longest_answer=6)
        assert len(found) == len(cases), done.stderr[-2000:]
        for case in cases:
            lines = (folder / "outputs" / case["name"] / "answers.jsonl").read_text().splitlines()
            given[case["name"]] = [json.loads(line)["answer"] for line in lines]
    assert len(given) == 1 + len(axes.STRATEGIES) and len(set(map(str, given.values()))) == 1
