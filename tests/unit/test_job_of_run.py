"""The planner's job of a run: its axes, what no formula covers, and its automatic micro-batch."""

import json

import pytest
import yaml

from brigade.plan.choice.job_of_recipe import counting, largest_fit
from brigade.plan.choice.job_of_run import NotCovered, job_of_run
from brigade.plan.hardware import gpu
from brigade.plan.runs.calibrate import record
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.strategy import Strategy
from brigade.train.strategy.axes import Axes
from testing.ranks import REPOSITORY as ROOT

CONFIG = json.loads((ROOT / "recipes" / "qwen3-4b" / "config.json").read_text())
BF16 = ["--bf16", "true", "--global_batch_size", "16", "--per_device_train_batch_size", "1"]


def of_run(strategy, ranks=8, words=(), config=CONFIG):
    recipe = flags.load([*BF16, *words]).recipe
    if ranks > 16:
        recipe = flags.load([*BF16, *words, "--global_batch_size", str(ranks)]).recipe
    batch = batch_arithmetic(recipe.training, strategy.axes.data(ranks), "")
    return job_of_run(recipe, strategy, batch, ranks, 8, config, "H100 80GB")


def test_a_run_s_axes_are_its_job_s():
    zero = {"zero_optimization": {"stage": 1}}
    found = of_run(Strategy("zero1", "zero1", "", ds_config=zero, axes=Axes(tensor=2, stages=2)))
    assert (found.data, found.tensor, found.pipeline, found.gpus, found.accumulation) == (2, 2, 2, 8, 8)
    assert found.axes == Axes(tensor=2, stages=2)
    fsdp2 = Strategy("fsdp2", "fsdp2", "", fsdp={"fsdp_version": 2}, axes=Axes(sequence=4))
    assert of_run(fsdp2).loss == "released"
    found = of_run(fsdp2, words=["--tiled_loss", "true"])
    assert (found.data, found.context, found.loss, found.tokens_per_step) == (2, 4, "tiled", 16 * found.sequence)
    assert yaml.safe_load(yaml.safe_dump(record(found)))["context"] == 4


@pytest.mark.parametrize("strategy, words, said", [
    (Strategy("ddp", "ddp", "", axes=Axes(tensor=2)), ["--use_peft", "true", "--use_dora", "true"], "DoRA under tensor 2"),
    (Strategy("zero3", "z", "", axes=Axes(stages=2), ds_config={"zero_optimization": {
        "stage": 3, "offload_param": {"device": "cpu"}}}), [], "offload under pipeline 2"),
    (Strategy("ddp", "ddp", "", axes=Axes(sequence=8)), ["--attn_implementation", "eager"], "eager attention under sequence 8"),
    (Strategy("ddp", "ddp", "", axes=Axes(tensor=5)), [], "and 5 do not 32"),
    (Strategy("ddp", "ddp", ""), ["--tiled_loss", "64"], "tiles of tiled_loss: true"),
    (Strategy("ddp", "ddp", ""), ["--tiled_mlp", "64"], "MLPs in tiles of tiled_mlp: auto"),
    (Strategy("ddp", "ddp", "", axes=Axes(tensor=2)), ["--tiled_mlp", "auto"], "MLPs in tiles under tensor 2"),
])  # fmt: skip
def test_what_no_formula_covers_is_named(strategy, words, said):
    with pytest.raises(NotCovered, match=said):
        of_run(strategy, ranks=40, words=words)


def test_a_pipeline_s_automatic_micro_batch_leaves_it_micro_batches():
    recipe = flags.load([*BF16, "--global_batch_size", "64"]).recipe
    found = {}
    for axes in (Axes(), Axes(stages=4)):
        batch = batch_arithmetic(recipe.training, axes.data(8), "")
        strategy = Strategy("ddp", "ddp", "", axes=axes)
        found[axes.stages] = largest_fit(recipe, strategy, batch, counting(strategy, 8, 8, CONFIG, gpu("H200"), ""))[0]
    assert (
        found[4] == 2 and found[1] >= 1
    )  # 32 rows of each data-parallel rank, of which four stages want 16 micro-batches
