"""Parameters of towers and projectors as the models have them, and tokens of images by the processors' own rules."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from brigade.errors import UserError
from brigade.plan.choice.job_of_recipe import published_models
from brigade.plan.costs.images import Asked, described_with_images
from brigade.plan.shape.built import build
from brigade.plan.shape.find import described, named_config
from brigade.plan.shape.image_tokens import image_of
from brigade.plan.shape.tower import described_with_tower, row_of, towers
from brigade.train.upstream.llama4_images import Llama4ImageProcessorPil
from testing.small_towers import config, shown

SIZES = [(1024, 1024), (640, 480), (3000, 500), (100, 700), (5000, 4000), (30, 40), (1500, 901)]


pytestmark = pytest.mark.usefixtures("cache_of_the_file")


# ---- parameters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", towers())
def test_parameters_are_the_model_s(kind):
    shape, tower, _ = described_with_tower(config(kind), "x", kind)
    with torch.device("meta"):
        model = build(config(kind), images=True)
    row = towers()[kind]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    projects = [name for name in sizes if any(name == one or name.startswith(f"{one}.") for one in row["projector"])]
    sees = [name for name in sizes if name.startswith(f"{row['tower']}.") and name not in projects]
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert tower.projector == sum(sizes[name] for name in projects) > 0
    assert tower.parameters == sum(sizes[name] for name in sees) > tower.shape.layers * tower.shape.dense_layer > 0
    assert shape.other == tower.parameters + tower.projector
    language = ("model.language_model.", "model.text_model.", "lm_head.", "language_model.")
    assert not [name for name in sizes if name not in {*sees, *projects} and not name.startswith(language)]


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "gemma-3-27b-it", "ministral-3-8b"])
def test_parameters_are_the_published_ones(name, in_the_repository):
    shape, tower, _ = described_with_tower(*named_config(name))
    assert shape.parameters == published_models()[name].parameters and tower.parameters > 4e8


def test_models_without_formulas_are_refused_by_name(in_the_repository, mistake):
    assert "reads no images" in mistake(lambda: described_with_tower(*named_config("qwen3-8b")))
    with pytest.raises(UserError, match=r"(?s)'idefics2'.*no formula counts its vision tower"):
        row_of({"model_type": "idefics2", "vision_config": {"hidden_size": 8}}, "x")
    with pytest.raises(UserError, match=r"(?s)'llava/siglip_vision_model'.*no formula counts its vision tower"):
        row_of({"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}}, "x")


def test_a_model_of_images_that_is_no_language_model_is_planned_with_them(mistake):
    """Its tower stands in a config.json as plain values."""
    assert "plan it with --images-per-sample" in mistake(lambda: described(config("llava/pixtral"), "x"))


# ---- tokens ----------------------------------------------------------------------------------------------------------
def image(kind, size, **values):
    whole = CONFIG_MAPPING[kind.partition("/")[0]].from_dict(config(kind)).to_dict()
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
@pytest.mark.parametrize("kind, longest, patch, merge", [("mistral3", 1540, 14, 2), ("llava/pixtral", 1024, 16, 1)])
def test_tokens_in_lines(kind, longest, patch, merge, size):
    side, pixels = patch * merge, np.zeros((size[1], size[0], 3), dtype=np.uint8)
    high, wide = get_resize_output_image_size(pixels, size=(longest, longest), patch_size=side)
    found = image(kind, size, vision_config={"image_size": longest, "patch_size": patch})
    assert found.features == high // side * (wide // side) and found.tokens == found.features + high // side
    assert found.patches == merge**2 * found.features


@pytest.mark.parametrize("size", SIZES)
def test_tokens_of_llama_4_s_tiles(size):
    processor = Llama4ImageProcessorPil(size={"height": 64, "width": 64})
    made = processor(np.zeros((size[1], size[0], 3), dtype=np.uint8), return_tensors="pt")
    text = Llama4Processor._prompt_split_image(None, made["aspect_ratios"][0].tolist(), 16)
    found, tiles = image("llama4", size), len(made["pixel_values"])
    assert (found.patches, found.features) == (tiles * 65, tiles * 16) and found.features == text.count("<|patch|>")
    assert found.tokens == text.count("<|")


def test_an_image_is_scaled_within_the_recipes_limits(mistake):
    """Qwen's processor takes them in place of its own."""

    def each(size, pixels=(None, None)):
        return described_with_images(config("qwen3_vl"), "x", "", Asked(1, size), (), pixels)[1].each

    assert each((2000, 1000), (500_000, None)).patches * 16**2 <= 500_000 < each((2000, 1000)).patches * 16**2
    assert each((200, 100), (None, 80_000)).patches * 16**2 >= 80_000
    assert "more than 200 times as long as wide" in mistake(shown, "qwen3_vl", size=(4030, 20))
