"""What the planner says of images: the memory and time of towers, and how recipes and flags ask for them."""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml

from brigade.plan.choice.job_of_run import NotCovered, check_texts, job_of_run
from brigade.plan.constants import CONSTANTS
from brigade.plan.costs.activations import layer_bytes, tower_bytes, tower_layer_bytes
from brigade.plan.costs.division import first_stage_states, stages
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.images import NOT_ASKED, Asked, described_with_images
from brigade.plan.costs.job import PROJECTOR, VISION_TOWER, Job, Replicas
from brigade.plan.costs.step_time import step_time
from brigade.plan.runs.calibrate import job_of_record, record
from brigade.plan.shape.built import build
from brigade.plan.shape.find import named_config
from brigade.plan.shape.tower import towers
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.strategy import Strategy
from testing.small_towers import config, job, shown

pytestmark = pytest.mark.usefixtures("cache_of_the_file")


# ---- memory ----------------------------------------------------------------------------------------------------------
def see(model, kind):
    """Run the tower of a small model, and return how many patches it had."""
    if kind == "llama4":
        model.vision_model(torch.randn(4, 3, 64, 64).bfloat16())
        return 4 * 65
    core = model.model
    if kind.startswith("qwen"):
        patch = core.visual.config.patch_size
        core.visual(torch.randn(256, 3 * 2 * patch**2).bfloat16(), grid_thw=torch.tensor([[1, 16, 16]]))
        return 256
    if kind == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(15), torch.arange(15), indexing="ij"), -1).reshape(1, 225, 2)
        core.vision_tower(torch.rand(1, 225, 3 * 64).bfloat16(), pixel_position_ids=places)
        return 225
    tower = core.vision_model if kind == "smolvlm" else core.vision_tower
    tower(torch.randn(4, 3, 64, 64).bfloat16())
    return 4 * (65 if kind == "internvl" else 64)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "smolvlm", "internvl",
                                  "llava_onevision", "llava/pixtral", "mistral3", "llama4"])  # fmt: skip
def test_a_layer_keeps_what_autograd_saves(kind):
    """The tower's own code in bf16, on a CPU: what its second layer saves, against the formula."""
    torch.manual_seed(0)
    model = build(config(kind), images=True).to(torch.bfloat16).train()
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved, marks, held = {}, [], []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
            held.append(tensor)
        return tensor

    row = towers()[kind]
    lists = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.startswith(row["tower"]) and name not in row["projector"]
    ]
    layers = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: marks.append(sum(saved.values())))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patches = see(model, kind)
    shape, images = shown(kind, trained=(VISION_TOWER,))
    images = replace(images, each=images.each._replace(patches=patches))
    counted = tower_layer_bytes(Job(shape, 8192, images=images))[0]
    assert counted == pytest.approx(marks[2] - marks[1], rel=0.07)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_frozen_tower_keeps_only_its_output(kind):
    frozen, projects, trains = (job(kind, trained) for trained in ((), (PROJECTOR,), (VISION_TOWER, PROJECTOR)))
    pixels = 4 * frozen.images.tower.pixels * frozen.images.each.patches
    assert tower_bytes(frozen)[0] == pixels < tower_bytes(projects)[0] < tower_bytes(trains)[0]
    assert tower_bytes(trains)[0] > 3 * tower_bytes(frozen)[1] / 2
    again = replace(trains, checkpointing="full")
    assert tower_bytes(again)[0] < tower_bytes(trains)[0]
    two = replace(trains, images=replace(trains.images, per_sample=2))
    assert tower_bytes(two)[0] == pytest.approx(2 * tower_bytes(trains)[0])


@pytest.mark.parametrize("engine, stage, ranks", [("zero", 2, 8), ("zero", 3, 8), ("fsdp2", 3, 8), ("ddp", 0, 8)])
def test_states_are_divided_as_the_strategy_divides(engine, stage, ranks):
    frozen, trains = (
        job(trained=trained, engine=engine, stage=stage, data=ranks) for trained in ((), (VISION_TOWER, PROJECTOR))
    )
    without, with_them = first_stage_states(frozen)[0], first_stage_states(trains)[0]
    beside = trains.images.beside
    assert beside == trains.shape.other and frozen.frozen_beside == beside and trains.frozen_beside == 0
    shard = ranks if stage else 1
    moments = {"zero": 12, "fsdp2": 8, "ddp": 8}[engine]
    assert with_them.optimizer - without.optimizer == pytest.approx(moments * beside / shard, rel=0.01)


def test_the_peak_of_a_large_tower_counts(in_the_repository):
    shape, images = described_with_images(*named_config("gemma-3-4b-it"), Asked(8, None), ())
    how = {"method": "lora", "trained": 10**7, "engine": "ddp", "checkpointing": "full", "loss": "fused"}
    lora = Job(shape, 4096, images=images, **how)
    texts = replace(lora, images=None)
    assert estimate(lora).memory.allocated > estimate(texts).memory.allocated
    assert estimate(lora).time.images > 0 and estimate(texts).time.images == 0


# ---- time ------------------------------------------------------------------------------------------------------------
def test_a_trained_tower_takes_about_three_times_as_long(in_the_repository):
    known = named_config("gemma-3-4b-it")
    seconds = []
    for trained in ((), (VISION_TOWER, PROJECTOR)):
        shape, images = described_with_images(*known, Asked(4, None), trained)
        seconds.append(step_time(Job(shape, 8192, micro_batch=4, images=images)).images)
    assert 2.5 < seconds[1] / seconds[0] < 3.6
    # 27 layers of 15 M products over 4,096 patches, 16 images: 2 N FLOPs and attention, at most at the H100's rate.
    assert seconds[0] > 2 * 0.4e9 * 4096 * 16 / 990e12


def test_masks_of_images_cost_time_and_memory(in_the_repository):
    shape, images = described_with_images(*named_config("gemma-3-4b-it"), Asked(), ())
    with_masks = Job(shape, 8192, images=images)
    without = replace(with_masks, images=replace(images, tower=replace(images.tower, masks=False)))
    assert step_time(with_masks).compute > step_time(without).compute
    assert layer_bytes(with_masks, moe=False)[0] > layer_bytes(without, moe=False)[0]


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_each_rank_of_a_group_has_the_whole_tower_and_all_images_of_the_group(axis):
    """As train.py runs them (docs/images.md): all else of a layer is divided."""
    alone = job("gemma3", data=8)
    group = replace(alone, data=4, **{axis: 2})
    assert tower_bytes(group) == tower_bytes(alone)
    assert step_time(group).images == pytest.approx(step_time(alone).images)
    assert group.images.tower.parameters and stages(group)[0].parameters > alone.images.tower.parameters
    divided = stages(alone)[0].parameters - stages(group)[0].parameters
    assert divided <= (alone.shape.parameters - alone.shape.other) / 2
    assert layer_bytes(group, moe=False)[0] * group.tokens < layer_bytes(alone, moe=False)[0] * alone.tokens


def test_a_tower_stays_in_bf16_beside_weights_in_four_bits():
    """As train.py loads it (train/model/load.py: quantization_config)."""
    alone = replace(job("qwen3_vl"), trained=10**5, engine="ddp", stage=0, data=1)
    lora, qlora = (replace(alone, method=method) for method in ("lora", "qlora"))
    in_16_bits = first_stage_states(lora)[0].parameters - first_stage_states(qlora)[0].parameters
    shape = lora.shape
    assert in_16_bits == pytest.approx(
        (2 - CONSTANTS.nf4_bytes) * (shape.layers * shape.dense_layer + shape.final_norm), rel=1e-6
    )
    assert step_time(qlora).images == step_time(lora).images and tower_bytes(qlora) == tower_bytes(lora)
    assert step_time(qlora).compute > step_time(lora).compute


@pytest.mark.parametrize("wrong, problem", [
    ({"pipeline": 2}, "pipeline 2 parallelism"),
    ({"replicas": Replicas(2)}, "train independently"),
    ({"sequence": 16}, "are more than a sequence of 16"),
])  # fmt: skip
def test_what_no_formula_counts_is_no_job(wrong, problem, mistake):
    assert problem in mistake(job, "qwen3_vl", **wrong)


# ---- recipes and flags -----------------------------------------------------------------------------------------------
def of_recipe(*words, kind="qwen3_vl", asked=NOT_ASKED, **changes):
    always = ["--bf16=true", "--global_batch_size=16", "--per_device_train_batch_size=1", "--max_length=4096"]
    recipe = flags.load([*always, *words]).recipe
    for section, values in changes.items():
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})
    batch = batch_arithmetic(recipe.training, 8, "")
    return job_of_run(recipe, Strategy("ddp", "ddp", ""), batch, 8, 8, config(kind), "H100 80GB", asked=asked)


def test_a_recipe_of_images_has_one_in_each_sample():
    found = of_recipe(data={"images": True})
    assert (found.images.per_sample, found.images.width, found.images.assumed) == (1, 1024, True)
    assert found.images.trained == (PROJECTOR,) and found.tokens_per_step == 16 * 4096
    assert job_of_record(yaml.safe_load(yaml.safe_dump(record(found))), "run.yaml") == found
    fewer = of_recipe(data={"images": True, "max_pixels": 100_000}, asked=Asked(0.5))
    assert fewer.images.tokens < found.images.tokens / 2
    with pytest.raises(NotCovered, match="reads images"):
        of_recipe()


def test_a_run_is_not_compared_with_a_number_of_images_that_nobody_counted():
    found = of_recipe(data={"images": True})
    with pytest.raises(NotCovered, match="how many images"):
        check_texts(found.images is not None)
    check_texts(False)


def test_adapters_lie_where_lora_parts_says():
    lora = ["--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_r", "4"]
    plain = of_recipe(*lora, data={"images": True})
    every = of_recipe(*lora, data={"images": True}, model={"lora_parts": ["language", "vision_tower", "projector"]})
    assert plain.images.trained == () and every.images.trained == (VISION_TOWER, PROJECTOR)
    with torch.device("meta"):
        visual = build(config("qwen3_vl"), images=True).model.visual
    widths = sum(m.in_features + m.out_features for m in visual.modules() if isinstance(m, torch.nn.Linear))
    assert every.trained - plain.trained == 4 * widths
    assert tower_bytes(every)[0] > tower_bytes(plain)[0]


def test_what_is_trained_is_the_recipe_s():
    def parts(**values):
        return of_recipe(data={"images": True}, model=values).images.trained

    assert parts() == (PROJECTOR,) and parts(freeze_projector=True) == ()
    assert parts(freeze_vision_tower=False) == (VISION_TOWER, PROJECTOR)
    assert parts(use_peft=True) == () and parts(use_peft=True, lora_parts=["vision_tower"]) == (VISION_TOWER,)


def test_the_command_plans_a_model_with_images(plan):
    words = ["gemma-3-4b-it", "--gpu", "H100", "--hostfile", "hostfiles/1x8"]
    code, text = plan(*words, "--images-per-sample", "2", "--image-size", "1280x720")
    assert code == 0 and "images   2 in a sample, 1,280 x 720 pixels: 260 tokens and 4,096 patches each" in text
    assert "520 of the 4,096 tokens of a sequence are images' (13%)" in text and "no GPU has measured images" in text
    assert "which a run freezes" not in text and "TP" not in text.split("images   ")[0]
    assert "in tiles" in text and "liger" not in text and "Liger" not in text  # which train.py refuses with images
    code, text = plan(*words, "--images_per_sample", "0.5", "--json", "--method", "lora")
    best = (found := json.loads(text))["plans"][found["chosen"]]
    assert code == 0 and best["images"]["per_sample"] == 0.5 and best["images"]["assumed_size"]
    assert best["seconds"]["images"]
    assert best["images"]["trained"] == [] and best["images"]["tokens_each"] == 260
    without = json.loads(plan(*words, "--json", "--method", "lora")[1])
    best = without["plans"][without["chosen"]]
    assert best["images"] is None and best["seconds"]["images"] == 0


def test_no_rehearsal_is_offered_that_would_be_refused(plan):
    code, text = plan("recipes/qwen3-vl-8b/full.yaml")
    assert code == 0 and "--rehearse" not in text and "python -m brigade launch" in text


def test_what_does_not_fit_has_a_way_out(plan):
    code, text = plan("gemma-3-27b-it", "--gpu", "L4", "--images-per-sample", "1", "--strategy", "ddp")
    assert code == 1 and "Nothing that train.py runs fits" in text


def test_more_pixels_are_more_of_everything():
    small, large = (
        estimate(replace(job("qwen3_vl"), images=shown("qwen3_vl", size=size)[1])) for size in ((320, 320), (960, 960))
    )
    assert large.time.images > small.time.images and math.isclose(large.time.compute, small.time.compute)
    assert large.job.images.tokens > 8 * small.job.images.tokens
