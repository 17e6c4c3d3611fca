"""A run that died goes on bit for bit; on other ranks or under another strategy, or with experts over ranks, with the losses of
the undisturbed run."""

import json

import pytest
import torch
from safetensors.torch import load_file

from brigade.__main__ import main
from testing import axes_experts, marks, resume, run_files, runs
from testing.resume import Resume, Side

RESHARDED = [
    *(
        Resume("full", Side(before, a), Side(after, b))
        for before, after in (
            ("zero2", "zero2"), ("zero3", "zero3"), ("fsdp2", "fsdp2"), ("ddp", "ddp"), ("zero1", "zero2"), ("zero2", "zero3"),
            ("zero3", "fsdp2"), ("fsdp2", "zero2"), ("zero3_offload", "ddp"), ("ddp", "zero3_offload"),
        )
        for a, b in ((2, 4), (2, 1), (2, 3))
    ),
    *(
        Resume(method, Side(before, 2), Side(after, ranks))
        for method, before, after, ranks in (
            ("LoRA", "ddp", "zero3", 4), ("LoRA", "zero3", "fsdp2", 1), ("LoRA", "fsdp2", "ddp", 3),
            ("QLoRA", "zero3", "zero2", 4), ("QLoRA", "zero2", "fsdp2", 3), ("LAMB", "ddp", "ddp", 4),
            ("LoRA+", "zero3", "fsdp2", 3), ("LoRA+", "fsdp2", "zero2", 2),
            ("schedule-free", "zero1", "fsdp2", 3), ("schedule-free", "fsdp2", "zero3", 1), ("schedule-free", "zero3", "ddp", 2),
            ("Muon", "zero1", "fsdp2", 3), ("Muon", "fsdp2", "zero3", 1), ("Muon", "zero3", "ddp", 2),
        )
    ),
]  # fmt: skip
BY_NAME = {case.name: case for case in [*RESHARDED, *resume.DIVIDED]}


@pytest.fixture(scope="module")
def exact(folder, asked_for):
    """Undisturbed and stopped runs."""
    return runs.run_each([case for name in sorted(asked_for("name")) for case in resume.exact(name)], folder)


@pytest.mark.parametrize("name", marks.cases(
    "fsdp2+best",
    slow=[
        "zero2_offload",
        "zero3",
        "ddp+power_sgd",
        "fsdp2_tp2+qdora",
        "zero2+8bit",
        "fsdp2+muon",
        "fsdp2+free+best",
        "ddp+routers",
    ],
    matrix=resume.EXACT,
))  # fmt: skip
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, exact, folder):
    resume.assert_same(exact[name], exact[f"{name}, stopped"])
    run_files.assert_same_models(folder, name, f"{name}, stopped")


@pytest.fixture(scope="module")
def resharded(tmp_path_factory, asked_for):
    """(what undisturbed runs logged, what runs logged that went on from their checkpoints)."""
    folder = tmp_path_factory.mktemp("resharded")
    cases = [BY_NAME[name] for name in sorted(asked_for("case_name"))]
    whole = resume.in_groups([(case.before, resume.run_of(case.method, case.before)) for case in cases], folder)
    return whole, resume.in_groups([(case.after, resume.continued(case, folder)) for case in cases], folder)


@pytest.mark.parametrize("case_name", marks.cases(
    "full, zero2 on 2 to zero3 on 3",
    "full, fsdp2 on 2 to fsdp2 on 3",
    slow=[
        "full, zero3 on 2 to fsdp2 on 4",
        "full, zero3_offload on 2 to ddp on 3",
        "QLoRA, zero3 on 2 to zero2 on 4",
        "Muon, zero1 on 2 to fsdp2 on 3",
        "LoRA, zero1_tp2 on 4 to fsdp2 on 2",
    ],
    matrix=BY_NAME,
))  # fmt: skip
def test_another_number_of_ranks_or_strategy_has_the_losses_of_the_undisturbed_run(case_name, resharded):
    whole, further = resharded
    case = BY_NAME[case_name]
    reference = whole[resume.run_of(case.method, case.before)["name"]]
    assert reference["loss"][-1] < 0.99 * reference["loss"][0]
    assert resume.worst(further[case_name], reference) <= resume.TOLERANCE


@pytest.mark.parametrize("strategy", marks.cases(slow=["zero3"], matrix=["zero2", "fsdp2"]))
def test_the_same_command_on_other_ranks_goes_on_and_takes_the_best_checkpoint_of_the_first_ones(strategy, tmp_path):
    """Its directory and early stopping are the same; the best checkpoint was written by two ranks, and four load it."""
    flags = resume.exact(f"{strategy}+best")[0]["flags"]
    first = [{"name": "whole", "flags": flags}, {"name": "run", "flags": flags, "stops": [7], "dies": True}]
    whole = runs.run_cases(2, first, tmp_path)["whole"]
    best = whole["eval_loss"].index(min(whole["eval_loss"]))
    assert 0 < 2 * best < 7, "two ranks write the best checkpoint"
    before = {
        path: path.read_bytes()
        for path in (tmp_path / f"outputs/run/checkpoint-{2 * best}").rglob("*.*")
        if path.is_file()
    }
    further = runs.run_cases(4, [{"name": "run", "flags": flags}], tmp_path)["run"]
    assert further["loss"] == pytest.approx(whole["loss"], rel=1e-4)  # at a rate at which rounding shows
    assert len(further["eval_loss"]) == len(whole["eval_loss"])
    success = json.loads((tmp_path / "outputs/run/success.json").read_text())
    assert success["saved_step"] == 2 * best
    assert success["held_out_loss"] == pytest.approx(min(whole["eval_loss"]), rel=1e-4)
    assert {path: path.read_bytes() for path in before} == before, "nothing changes a checkpoint"


# ---- experts over ranks ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def of_experts(folder, asked_for):
    pairs = {name: axes_experts.RESUMED[name] for name in axes_experts.RESUMED if name in asked_for("name")}
    whole = [((2, 2), "full"), *((topology, method) for *both, method in pairs.values() for topology in both)]
    found = runs.run_each([axes_experts.whole_run(*each) for each in whole], folder)
    return found | runs.run_each([axes_experts.continued(name, folder) for name in pairs], folder)


@pytest.mark.parametrize("name", marks.cases(
    slow=[
        "experts over 2 to FSDP2",
        "ZeRO-3 to experts over 2",
        "adapters, experts over 2 to themselves",
        "DDP to itself",
        "routers' biases, DDP to itself",
        "routers' biases, ZeRO-2 to itself",
        "routers' biases, DDP to FSDP2",
        "routers' biases, FSDP2 to ZeRO-3",
    ],
    matrix=axes_experts.RESUMED,
))  # fmt: skip
def test_it_continues_with_the_losses_of_an_undisturbed_run(name, folder, of_experts):
    before, after, method = axes_experts.RESUMED[name]
    whole = of_experts[axes_experts.whole_run(after, method)["name"]]
    difference = resume.worst(of_experts[name], whole)
    assert difference <= (0 if before == after else resume.TOLERANCE)
    both = ({"name": name}, axes_experts.whole_run(after, method))
    ours, theirs = (axes_experts.biases_of(each, folder) for each in both)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_the_model_and_the_export_are_one_processs(folder, of_experts):
    run = folder / "outputs" / axes_experts.whole_run((2, 2))["name"]
    trained, layout = load_file(run / "model.safetensors"), load_file(folder / "qwen3_moe" / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in trained.items()} == {
        n: (t.shape, t.dtype) for n, t in layout.items()
    }
    assert main(["export", str(run), str(folder / "exported")]) in (0, None)
    assert main(["export", str(run), str(folder / "middle"), "--step", str(resume.SAVED)]) in (0, None)
    exported, middle = (load_file(folder / name / "model.safetensors") for name in ("exported", "middle"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())
    assert exported.keys() == trained.keys()
    matrices = {name: tensor for name, tensor in trained.items() if tensor.dim() > 1}
    assert middle.keys() == trained.keys() and not any(torch.equal(middle[n], t) for n, t in matrices.items())
