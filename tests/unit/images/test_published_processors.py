"""What the planner takes an image for is what the processors make of it with the files that the models are published with."""

import hashlib
import json
import re

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from brigade.plan.costs.images import Asked, described_with_images
from brigade.plan.shape.find import named_config
from brigade.train.recipe import flags
from testing.ranks import REPOSITORY

HALF = [0.5, 0.5, 0.5]
SCALE = 0.00392156862745098
# preprocessor_config.json of the revision that recipes load, and the hash that the Hub has for it.
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": HALF,
    "image_std": HALF,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
GEMMA_3 = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": HALF,
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": HALF,
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": SCALE,
    "size": {"height": 896, "width": 896},
}
SMOLVLM2 = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": HALF,
    "image_processor_type": "SmolVLMImageProcessor",
    "image_std": HALF,
    "max_image_size": {"longest_edge": 512},
    "processor_class": "SmolVLMProcessor",
    "resample": 1,
    "rescale_factor": SCALE,
    "size": {"longest_edge": 2048},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
}
FILES = {  # the file's hash, its indentation, and what its last line ends with
    "qwen3-vl-8b": (QWEN3_VL, "2ea84a437d448ff71b08df68fdd949d5cc4ebb64", 4, ""),
    "gemma-3-4b-it": (GEMMA_3, "b1e00fc184f61b698181821169c6374cd5813e5c", 2, "\n"),
    "smolvlm2-500m": (SMOLVLM2, "bf7669a38692ad141d333db3be18bd55cb6e2c59", 2, "\n"),
}
pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.parametrize("name", FILES)
def test_these_are_the_published_files(name):
    values, published, indent, end = FILES[name]
    content = (json.dumps(values, indent=indent) + end).encode()
    assert hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == published


def planned(name, size, pixels=(None, None)):
    return described_with_images(*named_config(name), Asked(1, size), (), pixels)[1].each


@pytest.mark.parametrize("size", [(1024, 1024), (640, 480), (100, 80), (8000, 3000)])
def test_an_image_of_qwen3_vl(size):
    processor = Qwen2VLImageProcessorPil(**QWEN3_VL)
    patches = processor.get_number_of_image_patches(size[1], size[0])
    found = planned("qwen3-vl-8b", size)
    assert (found.patches, found.tokens) == (patches, patches // processor.merge_size**2 + 2)


def test_the_recipes_bound_is_a_thousand_tokens():
    for name in ("lora", "full"):
        data = flags.load(["--recipe", str(REPOSITORY / f"recipes/qwen3-vl-8b/{name}.yaml")]).recipe.data
        assert planned("qwen3-vl-8b", (8000, 8000), (data.max_pixels, data.min_pixels)).features == 1024


def test_an_image_of_gemma_3():
    """Its tower sees squares of the processor's size, and none of its parts by itself."""
    vision = AutoConfig.from_pretrained("recipes/gemma-3-4b-it").vision_config
    assert GEMMA_3["size"] == {"height": vision.image_size, "width": vision.image_size}
    found = planned("gemma-3-4b-it", (640, 480))
    assert (found.features, found.patches) == (256, (vision.image_size // vision.patch_size) ** 2)
    assert GEMMA_3["image_seq_length"] == 256 and not GEMMA_3["do_pan_and_scan"]


@pytest.mark.parametrize("size", [(1024, 1024), (640, 480), (300, 900)])
def test_an_image_of_smolvlm2(size):
    """Cut into squares, with as many tokens for each as the processor writes; the special tokens are one token each."""
    config = AutoConfig.from_pretrained("recipes/smolvlm2-500m")
    processor = SmolVLMImageProcessorPil(**SMOLVLM2)
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    made = processor(pixels, return_row_col_info=True)
    (rows,), (columns,) = made["rows"][0], made["cols"][0]
    side = config.vision_config.image_size // config.vision_config.patch_size
    found = planned("smolvlm2-500m", size)
    tiles = len(made["pixel_values"][0])
    assert tiles == rows * columns + 1 and found.patches == tiles * side**2
    text = get_image_prompt_string(rows, columns, 64, "<fake>", "<image>", "<global-img>")
    assert found.features == text.count("<image>") == tiles * (side // config.scale_factor) ** 2
    assert found.tokens == len(re.findall(r"<[^>]+>|\n", text))
