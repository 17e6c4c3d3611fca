"""Tensor parallelism prints the losses, gradient norms and held-out losses of a single process, and saves its model."""

import pytest

from testing import axes, marks, parity, run_files, runs

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
def results(folder, asked_for):
    """By name, also of the single process that each case is compared with."""
    names = asked_for("name")
    alone = [axes.reference(of) for of in sorted({variant(name) for name in names} | {""})]
    return runs.run_each([*alone, *((CASES | {"damaged": DAMAGED})[name] for name in sorted(names))], folder)


@pytest.mark.parametrize("name", marks.cases(
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
))  # fmt: skip
def test_tensor_parallelism_equals_one_process(name, results, folder):
    known = results[f"single+{variant(name)}"]
    parity.assert_equal(results[name], known)
    assert known["loss"][-1] < 0.99 * known["loss"][0]
    run_files.assert_close_models(folder, name, f"single+{variant(name)}")


@pytest.mark.cases(name="damaged")
@pytest.mark.slow
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(results):
    parity.assert_damage_shows(results["damaged"], results["single+"])


@pytest.mark.slow
def test_answers_are_those_of_one_process(tmp_path_factory):
    """A tied head gives each of AutoTP's ranks the logits of its own tokens alone."""
    given = {}
    for ranks, cases in ((1, [axes.reference()]), (2, [axes.case(strategy, 2, 1) for strategy in axes.STRATEGIES])):
        folder = tmp_path_factory.mktemp(f"answers{ranks}")
        shared = runs.write_inputs(folder)
        few = ["--eval_answers", "5", "--answer_score", "text", "--per_device_eval_batch_size", "2"]
        few += ["--max_steps", "4", "--eval_steps", "4"]
        whole = [runs.prepared(case | {"flags": [*case["flags"], *few]}, folder, shared) for case in cases]
        runs.run_well(ranks, whole, folder, 600, longest_answer=6)
        for case in cases:
            answers = run_files.answers(folder / "outputs" / case["name"])
            given[case["name"]] = [answer["answer"] for answer in answers]
    assert len(given) == 1 + len(axes.STRATEGIES) and len(set(map(str, given.values()))) == 1
