"""A run with experts over ranks continues what another topology wrote, and another topology what it wrote; and its model, and
what `export` makes of its checkpoints, is a Hugging Face directory equal to one process's to the bit in names and shapes."""

import pytest
import torch
from safetensors.torch import load_file

from brigade.__main__ import main
from testing import axes_experts, marks, resume, runs


@pytest.fixture(scope="module")
def results(folder, asked_for):
    pairs = {name: axes_experts.RESUMED[name] for name in axes_experts.RESUMED if name in asked_for("name")}
    whole = [((2, 2), "full"), *((topology, method) for *both, method in pairs.values() for topology in both)]
    found = runs.run_each([axes_experts.whole_run(*each) for each in whole], folder)
    return found | runs.run_each([axes_experts.continued(name, folder) for name in pairs], folder)


@pytest.mark.parametrize(
    "name",
    marks.cases(
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
    ),
)
def test_it_continues_with_the_losses_of_an_undisturbed_run(name, folder, results):
    before, after, method = axes_experts.RESUMED[name]
    whole = results[axes_experts.whole_run(after, method)["name"]]
    difference = resume.worst(results[name], whole)
    assert difference <= (0 if before == after else resume.TOLERANCE)
    ours, theirs = (
        axes_experts.biases_of(each, folder) for each in ({"name": name}, axes_experts.whole_run(after, method))
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_the_model_and_the_export_are_one_processs(folder, results):
    run = folder / "outputs" / axes_experts.whole_run((2, 2))["name"]
    trained, layout = load_file(run / "model.safetensors"), load_file(folder / "qwen3_moe" / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in trained.items()} == {
        n: (t.shape, t.dtype) for n, t in layout.items()
    }
    assert main(["export", str(run), str(folder / "exported")]) in (0, None)
    assert main(["export", str(run), str(folder / "middle"), "--step", str(resume.SAVED)]) in (0, None)
    exported, middle = (load_file(folder / name / "model.safetensors") for name in ("exported", "middle"))
    assert (
        all(torch.equal(exported[name], tensor) for name, tensor in trained.items())
        and exported.keys() == trained.keys()
    )
    assert middle.keys() == trained.keys() and not any(
        torch.equal(middle[n], t) for n, t in trained.items() if t.dim() > 1
    )
