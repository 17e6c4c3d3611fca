"""A processor that does not fit its model is found before anything is built: it writes other tokens than there are features."""

import json
import shutil

import pytest
from transformers import AutoConfig, AutoTokenizer

from brigade.train.model.images import features
from brigade.train.recipe import flags
from testing.vision_kinds import KINDS


def load(folder):
    settings = flags.load(["--model_name_or_path", str(folder), "--images", "true"])
    return features.load_checked(settings, AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_processor_writes_as_many_tokens_as_there_are_features(kind, written):
    assert load(written(kind).folder).image_token_id == written(kind).processor.image_token_id


STRATEGY = ("config.json", "vision_feature_select_strategy", "default")


@pytest.mark.parametrize("kind, file, key, value, said", [
    ("qwen3_vl", "preprocessor_config.json", "merge_size", 4,
     "writes 4 tokens for an image of 300 x 900 pixels, of which the model makes 16 features"),
    ("mistral3", "config.json", "spatial_merge_size", 1,
     "writes 8 tokens for an image of 300 x 900 pixels, of which the model makes 32 features"),
    ("llava_onevision", *STRATEGY, "LlavaOnevisionConfig cannot read what the processor makes"),
    ("llava/pixtral", *STRATEGY, "LlavaConfig cannot read what the processor makes"),
])  # fmt: skip
def test_a_processor_of_another_model_is_refused(kind, file, key, value, said, written, mistake, tmp_path):
    folder = shutil.copytree(written(kind).folder, tmp_path / "model")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | {key: value}))
    message = mistake(load, folder)
    assert said in message and "flag --model_name_or_path" in message


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "llava", "llava_onevision",
                                        "mistral3", "llama4"])  # fmt: skip
def test_the_tiny_model_is_tiny_whatever_the_size_of_the_tower(model_type):
    """Each rank builds it, so that a tower of its published size would take gigabytes and half a minute (Qwen2-VL's)."""
    tiny = features._tiny(AutoConfig.for_model(model_type))
    assert sum(parameter.numel() for parameter in tiny.parameters()) < 2e7
