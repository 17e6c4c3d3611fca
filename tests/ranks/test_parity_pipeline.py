"""A pipeline has the losses, gradient norms and held-out losses of one process, its checkpoints go on anywhere, and its model is
written as one process writes it."""

import json

import pytest
from safetensors import safe_open

from testing import axes_pipeline, marks, parity, resume, run_files, runs
from testing.axes_pipeline import SCHEDULES, ddp, zero1

# name -> (kind, strategy, stages, ranks, accumulation, what its config says of the schedule)
CASES = {
    **{f"ddp-p2-w2-k{k}": ("tied", ddp, 2, 2, k, {}) for k in (1, 2, 4)},
    **{f"ddp-p2-w4-k{k}": ("tied", ddp, 2, 4, k, {}) for k in (1, 2, 4)},
    **{f"{kind}-p2-w4-k2": (kind, zero1, 2, 4, 2, {}) for kind in axes_pipeline.KINDS if kind != "deep"},
    **{f"{name}-p2-w2-k4": ("deep", ddp, 2, 2, 4, more) for name, more in SCHEDULES.items()},
    **{f"{name}-p2-w4-k2": ("deep", zero1, 2, 4, 2, more) for name, more in SCHEDULES.items()},
    **{f"ddp-p4-w4-k{k}": ("deep", ddp, 4, 4, k, {}) for k in (2, 4)},
    **{
        f"{kind}-p2-t2-w4-k2": (kind, ddp, 2, 4, 2, {"tensor": 2})
        for kind in ("tied", "untied", "lora", "packed", "qdora")
    },
    "zbv-p2-t2-w4-k4": ("deep", ddp, 2, 4, 4, {"tensor": 2, **SCHEDULES["zbv"]}),
    **{f"{kind}-p2-t2-w8-k2": (kind, zero1, 2, 8, 2, {"tensor": 2}) for kind in ("tied", "untied")},
}


@pytest.fixture(scope="module")
def results(folder, asked_for):
    """By name; a reference has its kind's name."""
    names = asked_for("name")
    chosen = {name: CASES[name] for name in CASES if name in names}
    kinds = dict.fromkeys(["tied", *(kind for kind, *_ in chosen.values())])
    cases = [axes_pipeline.reference(kind, folder) for kind in kinds]
    for name, (kind, strategy, stages, ranks, accumulation, more) in chosen.items():
        flags, data = strategy(folder, stages, **more), ranks // stages // more.get("tensor", 1)
        cases.append(axes_pipeline.case(name, kind, flags, data, accumulation, folder, ranks=ranks))
    if "damaged" in names:
        cases.append(axes_pipeline.case("damaged", "tied", ddp(folder, 2), 2, 2, folder, ranks=4, damage=True))
    return runs.run_each(cases, folder)


@pytest.mark.parametrize("name", marks.cases(
    *("ddp-p2-w2-k4", "lora-p2-w4-k2", "zbv-p2-w4-k2"),
    slow=[
        *(f"{kind}-p2-w4-k2" for kind in ("gemma3", "packed", "clipped", "interleaved1f1b")),
        *("qdora-p2-t2-w4-k2", "zbv-p2-t2-w4-k4"),
    ],
    matrix=CASES,
))  # fmt: skip
def test_a_pipeline_equals_one_process(name, results, folder):
    kind = CASES[name][0]
    learns = 0.99 if "--use_peft" in axes_pipeline.KINDS[kind][0] else 0.95
    assert results[kind]["loss"][-1] < learns * results[kind]["loss"][0]
    parity.assert_equal(results[name], results[kind])
    whole, ours = (next((folder / "outputs" / each).glob("*model.safetensors")) for each in (kind, name))
    with safe_open(whole, "pt") as one, safe_open(ours, "pt") as other:  # as one process lays it out
        assert list(one.keys()) == list(other.keys()) and one.metadata() == other.metadata()
    for file in ("config.json", "generation_config.json", "adapter_config.json"):
        assert (whole.parent / file).exists() == (ours.parent / file).exists()
        if (whole.parent / file).exists():
            assert (whole.parent / file).read_text() == (ours.parent / file).read_text()


@pytest.mark.slow
@pytest.mark.cases(name="damaged")
def test_a_one_percent_error_in_one_ranks_gradient_is_caught(results):
    parity.assert_damage_shows(results["damaged"], results["tied"])


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def run(name, *flags, **more):
    return {"name": name, "flags": [*resume.SHARED, "--per_device_train_batch_size", "4", *flags], **more}


@pytest.fixture(scope="module")
def resumed(folder):
    """Undisturbed runs, and runs that go on from what another one left after four steps."""

    def after(name):
        return ["--resume_from_checkpoint", str(folder / "outputs" / name / f"checkpoint-{resume.SAVED}")]

    pipeline, sharded = ddp(folder, 2), zero1(folder, 2)
    found = runs.run_cases(1, [run("one")], folder)
    four = [
        run("zero1", *sharded),
        run("zero1, stopped", *sharded, stops=resume.STOPS),
        run("one, zero1", *sharded, *after("one")),
    ]
    found |= runs.run_cases(4, four, folder)
    tensor = ddp(folder, 2, tensor=2)
    again = [run("tensor", *tensor), run("tensor, stopped", *tensor, stops=resume.STOPS)]
    again += [run("one, tensor", *tensor, *after("one")), run("tensor, zero1", *sharded, *after("tensor"))]
    found |= runs.run_cases(4, again, folder)
    others = {"ddp x 2": pipeline, **{name: parity.STRATEGIES[name] for name in ("fsdp2", "zero2")}}
    two = [run(f"zero1, {name}", *flags, *after("zero1")) for name, flags in others.items()]
    two += [run("fsdp2", *parity.STRATEGIES["fsdp2"]), run("fsdp2, zero1", *sharded, *after("fsdp2"))]
    found |= runs.run_cases(2, two, folder)
    return found | runs.run_cases(1, [run("zero1, one", *after("zero1"))], folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "tensor"])
def test_a_pipeline_that_died_twice_goes_on_bit_for_bit(name, resumed, folder):
    assert resumed[f"{name}, stopped"] == resumed[name]
    run_files.assert_same_models(folder, name, f"{name}, stopped")


@pytest.mark.slow
def test_a_pipelines_checkpoint_goes_on_anywhere_and_takes_any(resumed):
    for name, result in resumed.items():
        assert resume.worst(result, resumed["one"]) <= resume.TOLERANCE, name


@pytest.mark.slow
def test_the_summary_says_what_each_rank_does(resumed, folder):
    said = " ".join(json.loads((folder / "zero1.result.json").read_text())["said"].split())
    assert "zero1-2-1 x pipeline 2" in said
    assert "1f1b, 1, 1 layers in its stages, 2 micro-batches: a rank idles 33% of a step" in said
