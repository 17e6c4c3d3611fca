"""What the planner says of images: tower and projector counted exactly, tokens by the processors' own rules, memory and time."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from brigade.errors import UserError
from brigade.plan.choice.images import NOT_ASKED, Asked, described_with_images
from brigade.plan.choice.job_of_recipe import published_models
from brigade.plan.choice.job_of_run import NotCovered, check_texts, job_of_record, job_of_run, record
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import PROJECTOR, VISION_TOWER, Job, Replicas
from brigade.plan.costs.memory import layer_bytes, tower_bytes, tower_layer_bytes
from brigade.plan.costs.states import first_stage_states
from brigade.plan.costs.step_time import step_time
from brigade.plan.shape.find import named_config
from brigade.plan.shape.image_tokens import image_of
from brigade.plan.shape.tower import build, described_with_tower, row_of, towers
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.strategy import Strategy

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": 64, "patch_size": 8}  # fmt: skip
QWEN = {"depth": 3, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "out_hidden_size": 64}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
SMALL = {
    "qwen2_5_vl": {"text_config": TEXT, "vision_config": QWEN | {"fullatt_block_indexes": [1]}},
    "qwen3_vl": {"text_config": TEXT, "vision_config": QWEN | {"deepstack_visual_indexes": [0, 2]}},
    "qwen3_vl_moe": {"text_config": TEXT | EXPERTS, "vision_config": QWEN | {"deepstack_visual_indexes": [0]}},
    "qwen3_5": {"text_config": TEXT | HYBRID, "vision_config": QWEN},
    "qwen3_5_moe": {"text_config": TEXT | HYBRID | SHARED, "vision_config": QWEN},
    "gemma3": {"text_config": TEXT, "vision_config": VISION | {"vision_use_head": False}, "mm_tokens_per_image": 16},
    "gemma4": {"text_config": TEXT, "audio_config": None, "vision_config": {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "patch_size": 8}},
    "smolvlm": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION},
    "internvl": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VISION | {
        "image_size": [64, 64], "patch_size": [8, 8]}},
    "llava_onevision": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {
        "model_type": "siglip_vision_model", "vision_use_head": False, **VISION}},
    "mistral3": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": {
        "model_type": "pixtral", **VISION, "head_dim": 16}},
}  # fmt: skip
SIZES = [(1024, 1024), (640, 480), (3000, 500), (100, 700), (5000, 4000), (30, 40), (1500, 901)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIGADE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def config(kind):
    return {"model_type": kind, **SMALL[kind]}


def shown(kind, per_sample=1.0, size=(640, 480), trained=()):
    return described_with_images(config(kind), "x", kind, Asked(per_sample, size), trained)


def job(kind="gemma3", trained=(), **options):
    shape, images = shown(kind, trained=trained)
    return Job(shape, **({"sequence": 8192, "images": images, "loss": "released"} | options))


# ---- parameters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", towers())
def test_parameters_are_the_model_s(kind):
    shape, tower, _ = described_with_tower(config(kind), "x", kind)
    with torch.device("meta"):
        model = build(config(kind))
    row = towers()[kind]
    sizes = {name: parameter.numel() for name, parameter in model.model.named_parameters()}
    projects = [name for name in sizes if any(name == one or name.startswith(f"{one}.") for one in row["projector"])]
    sees = [name for name in sizes if name.startswith(f"{row['tower']}.") and name not in projects]
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert tower.projector == sum(sizes[name] for name in projects) > 0
    assert tower.parameters == sum(sizes[name] for name in sees) > tower.in_layers > 0
    assert shape.other == tower.parameters + tower.projector
    assert not [name for name in sizes if name not in {*sees, *projects} and not name.startswith("language_model")
                and not name.startswith("text_model")]  # fmt: skip


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "gemma-3-27b-it", "ministral-3-8b"])
def test_parameters_are_the_published_ones(name, in_the_repository):
    shape, tower, _ = described_with_tower(*named_config(name))
    assert shape.parameters == published_models()[name].parameters and tower.parameters > 4e8


def test_models_without_formulas_are_refused_by_name(in_the_repository):
    with pytest.raises(UserError, match="reads no images"):
        described_with_tower(*named_config("qwen3-8b"))
    with pytest.raises(UserError, match=r"(?s)'idefics2'.*no formula counts its vision tower"):
        row_of({"model_type": "idefics2", "vision_config": {"hidden_size": 8}}, "x")


# ---- tokens ----------------------------------------------------------------------------------------------------------
def image(kind, size, **values):
    whole = CONFIG_MAPPING[kind].from_dict(config(kind)).to_dict()
    for section, changes in values.items():
        whole[section] = {**whole[section], **changes} if isinstance(changes, dict) else changes
    return image_of(towers()[kind], whole, *size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_tokens_of_an_area(kind, size):
    row = towers()[kind]
    numbers = {"min_pixels": row["min_pixels"], "max_pixels": row["max_pixels"], "patch_size": 14, "merge_size": 2}
    patches = Qwen2VLImageProcessorPil(**numbers).get_number_of_image_patches(size[1], size[0])
    found = image(kind, size, vision_config={"patch_size": 14})
    assert (found.patches, found.features, found.tokens) == (patches, patches // 4, patches // 4 + 2)


def test_gemma_3_has_256_tokens_for_each():
    found = image("gemma3", (5000, 30), vision_config={"image_size": 896, "patch_size": 14}, mm_tokens_per_image=256)
    assert (found.patches, found.features) == (4096, 256)


@pytest.mark.parametrize("size", SIZES)
def test_tokens_within_a_budget(size):
    high, wide = get_aspect_ratio_preserving_size(size[1], size[0], 16, 280 * 9, 3)
    found = image("gemma4", size, vision_config={"patch_size": 16})
    assert found.features == high * wide // 48**2 and found.patches == 2520


@pytest.mark.parametrize("size", SIZES)
def test_tokens_of_smolvlm_s_tiles(size):
    processor = SmolVLMImageProcessorPil(size={"longest_edge": 256}, max_image_size={"longest_edge": 64})
    result = processor(np.zeros((size[1], size[0], 3), dtype=np.uint8), return_row_col_info=True)
    (rows,), (columns,) = result["rows"][0], result["cols"][0]
    found = image("smolvlm", size)
    assert found.patches == 64 * (rows * columns + 1) and found.features == 16 * (rows * columns + 1)


@pytest.mark.parametrize("size", SIZES)
def test_tokens_of_a_canvas(size):
    processor = GotOcr2ImageProcessorPil(
        size={"height": 64, "width": 64}, min_patches=1, max_patches=12, crop_to_patches=True
    )
    tiles = processor.get_number_of_image_patches(size[1], size[0])
    found = image("internvl", size)
    assert (found.patches, found.features) == (tiles * 65, tiles * 16)


@pytest.mark.parametrize("size", SIZES)
def test_tokens_of_pinpoints(size):
    shell = SimpleNamespace(image_processor=LlavaOnevisionImageProcessorPil, num_image_tokens=729,
                            vision_aspect_ratio="anyres_max_9")  # fmt: skip
    shell._get_unpadded_features = LlavaOnevisionProcessor._get_unpadded_features.__get__(shell)
    tokens = LlavaOnevisionProcessor._get_number_of_features(shell, size[1], size[0], 384, 384)
    assert image("llava_onevision", size, vision_config={"image_size": 384, "patch_size": 14}).tokens == tokens


@pytest.mark.parametrize("size", SIZES)
def test_tokens_in_lines(size):
    high, wide = get_resize_output_image_size(
        np.zeros((size[1], size[0], 3), dtype=np.uint8), size=(1540, 1540), patch_size=28
    )
    found = image("mistral3", size, vision_config={"image_size": 1540, "patch_size": 14})
    assert found.features == high // 28 * (wide // 28) and found.tokens == found.features + high // 28


def test_an_image_is_scaled_before():
    def each(size, pixels=(None, None)):
        return described_with_images(config("qwen3_vl"), "x", "", Asked(1, size), (), pixels)[1].each

    assert each((2000, 1000), (500_000, None)) == each((1000, 500)) != each((2000, 1000))
    assert each((200, 100), (None, 80_000)) == each((400, 200)) and each((30, 20)) == each((30, 20), (600, 600))
    with pytest.raises(UserError, match="more than 200 times as long as wide"):
        shown("qwen3_vl", size=(4030, 20))


# ---- memory ----------------------------------------------------------------------------------------------------------
def see(model, kind):
    """Run the tower of a small model, and return how many patches it had."""
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
                                  "llava_onevision", "mistral3"])  # fmt: skip
def test_a_layer_keeps_what_autograd_saves(kind):
    """The tower's own code in bf16, on a CPU: what its second layer saves, against the formula."""
    torch.manual_seed(0)
    model = build(config(kind)).to(torch.bfloat16).train()
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
        for name, module in model.model.named_modules()
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
    lora = Job(
        shape, 4096, method="lora", trained=10**7, engine="ddp", checkpointing="full", loss="fused", images=images
    )
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


@pytest.mark.parametrize("wrong, problem", [
    ({"tensor": 2}, "tensor 2 parallelism"),
    ({"context": 2}, "sequence 2 parallelism"),
    ({"method": "qlora", "trained": 10**5}, "weights in four bits"),
    ({"replicas": Replicas(2)}, "train independently"),
    ({"sequence": 16}, "are more than a sequence of 16"),
])  # fmt: skip
def test_what_no_formula_counts_is_no_job(wrong, problem):
    with pytest.raises(UserError, match=problem):
        job("qwen3_vl", **wrong)


# ---- recipes and flags -----------------------------------------------------------------------------------------------
def of_recipe(*words, kind="qwen3_vl", asked=NOT_ASKED, **changes):
    always = [
        "--bf16",
        "true",
        "--global_batch_size",
        "16",
        "--per_device_train_batch_size",
        "1",
        "--max_length",
        "4096",
    ]
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
        visual = build(config("qwen3_vl")).model.visual
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
    assert "in tiles" not in text and "liger" not in text and "Liger" not in text  # which train.py refuses with images
    code, text = plan(*words, "--images_per_sample", "0.5", "--json", "--method", "lora")
    best = (found := json.loads(text))["plans"][found["chosen"]]
    assert (
        code == 0
        and best["images"]["per_sample"] == 0.5
        and best["images"]["assumed_size"]
        and best["seconds"]["images"]
    )
    assert best["images"]["trained"] == [] and best["images"]["tokens_each"] == 260
    without = json.loads(plan(*words, "--json", "--method", "lora")[1])
    best = without["plans"][without["chosen"]]
    assert best["images"] is None and best["seconds"]["images"] == 0


@pytest.mark.parametrize("words, said", [
    (["qwen3-8b", "--gpu", "H100", "--images-per-sample", "1"], "its config.json has no vision_config"),
    (["glm-4.5-air", "--gpu", "H100", "--image-size", "10x10"], "its config.json has no vision_config"),
    (["gemma-3-4b-it", "--gpu", "H100", "--image-size", "big"], "is no width and height"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "20"], "are more than a sequence of 4,096"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--trace"], "of images nothing is traced"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--write", "x"], "a recipe of images is not written"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--method", "qlora"], "weights in 4 bits"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--liger"], "compared those with images"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--objective", "dpo"], "have texts only"),
    (["recipes/qwen3-8b/full.yaml", "--images-per-sample", "1"], "this recipe reads none"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_cure(plan, words, said):
    code, text = plan(*words)
    assert code == 2 and said in text and "cure:" in text


def test_no_rehearsal_is_offered_that_would_be_refused(plan):
    code, text = plan("recipes/qwen3-vl-8b/full.yaml")
    assert code == 0 and "--rehearse" not in text and "deepspeed --hostfile" in text


def test_what_does_not_fit_has_a_way_out(plan):
    code, text = plan("gemma-3-27b-it", "--gpu", "L4", "--images-per-sample", "1", "--strategy", "ddp")
    assert code == 1 and "Nothing that train.py runs fits" in text


def test_more_pixels_are_more_of_everything():
    small, large = (
        estimate(replace(job("qwen3_vl"), images=shown("qwen3_vl", size=size)[1])) for size in ((320, 320), (960, 960))
    )
    assert large.time.images > small.time.images and math.isclose(large.time.compute, small.time.compute)
    assert large.job.images.tokens > 8 * small.job.images.tokens
