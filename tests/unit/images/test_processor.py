"""What an image becomes is what the model's own processor makes of it, and as many embeddings as tokens; a processor that does
not fit its model is found before anything is built."""

import json
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from brigade.errors import UserError
from brigade.train.model import trial
from brigade.train.model.images import features
from brigade.train.model.images import processor as processors
from brigade.train.model.images.load import load, read_processor
from brigade.train.recipe import flags
from brigade.train.upstream.image_processors import read_image_processor
from testing.vision_configs import MODELS
from testing.vision_kinds import KINDS

SIZES = [(32, 32), (48, 20), (17, 60)]


def test_the_models_are_those_that_the_tests_prove():
    assert set(processors.models()) == set(MODELS)


@pytest.mark.parametrize("kind", KINDS)
def test_expansions_are_those_of_the_real_processor(kind, written, picture):
    """Several images of different sizes in one text, tokenised by the processor itself."""
    model = written(kind)
    token, images = model.processor.image_token, [picture(n, *size).open() for n, size in enumerate(SIZES)]
    real = model.processor.own(text=[f"a{token}b{token}c{token}d"], images=images)
    text = "".join(letter + model.processor.expansion(*size) for letter, size in zip("abc", SIZES, strict=True)) + "d"
    assert model.tokenizer(text)["input_ids"] == list(real["input_ids"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_as_many_embeddings_as_tokens(kind, written, picture):
    model = written(kind)
    made = model.model()
    pixels = read_image_processor(str(model.folder), None, model.config)
    for number, size in enumerate(SIZES):
        image = picture(number, *size).open()
        tensors = model.processor.tensors([image])
        arguments = {"crop_to_patches": True} if kind == "internvl" else {}
        arguments |= {"patch_size": 8} if kind == "mistral3" else {}
        assert torch.equal(tensors["pixel_values"], pixels([image], return_tensors="pt", **arguments)["pixel_values"])
        tensors.pop("batch_num_images", None)
        features = made.get_image_features(**tensors, return_dict=True)
        features = features.last_hidden_state if kind == "llama4" else features.pooler_output
        count = sum(feature.shape[:-1].numel() for feature in features)
        ids = model.tokenizer(model.processor.expansion(*size))["input_ids"]
        assert ids.count(model.processor.image_token_id) == count


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_writes_one_token_for_each_image(kind, written):
    model = written(kind)
    question = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    text = model.tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.count(model.processor.image_token) == 2 and text.index("and") < text.index("so")
    prompt = model.tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    # LLaVA-OneVision's has a space before the answer that it leaves out of the prompt, as that of the published models.
    assert text.startswith(prompt) is (kind != "llava_onevision")
    assert sum(each.numel() for each in model.model().parameters()) < 500_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_blank_is_an_image_of_few_tokens_without_a_label(kind, written):
    blank = written(kind).processor.blank()
    assert (blank["labels"] == -100).all() and len(blank["images"]) == 1
    ids = blank["input_ids"].tolist()
    assert ids.count(written(kind).processor.image_token_id) > 0 and len(ids) <= 80
    assert blank["images"][0].open().size == (blank["images"][0].width, blank["images"][0].height)


def test_a_pickled_processor_gives_the_same(written, picture):
    processor = written("smolvlm").processor
    other = pickle.loads(pickle.dumps(processor))
    assert other.expansion(17, 60) == processor.expansion(17, 60) and other.identity() == processor.identity()
    tensors = other.tensors([picture(1, 17, 60).open()])
    assert torch.equal(tensors["pixel_values"], processor.tensors([picture(1, 17, 60).open()])["pixel_values"])


def changed(model, tmp_path, name, **keys):
    """A copy of a model's folder, with other keys in one of its files."""
    shutil.copytree(model.folder, tmp_path / "changed")
    file = tmp_path / "changed" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return tmp_path / "changed"


@pytest.mark.parametrize("name, keys", [
    ("preprocessor_config.json", {"size": {"height": 24, "width": 24}}),
    ("processor_config.json", {"image_seq_length": 5}),
])  # fmt: skip
def test_another_setting_is_another_identity(name, keys, written, tmp_path):
    model = written("internvl")
    folder = str(changed(model, tmp_path, name, **keys))
    other = read_processor("model", folder, None, model.config, model.tokenizer)
    assert other.identity() != model.processor.identity()
    again = read_processor("model", str(model.folder), None, model.config, model.tokenizer)
    assert again.identity() == model.processor.identity()


def settings(**keys):
    model = {"model_name_or_path": "there", "processor_name_or_path": None, "revision": None} | keys
    recipe = SimpleNamespace(
        data=SimpleNamespace(images=keys.pop("images", True), max_pixels=None, min_pixels=None),
        model=SimpleNamespace(**model),
    )
    return SimpleNamespace(recipe=recipe, place=lambda key: f"recipe.yaml: {key}")


def test_a_processor_is_loaded_where_rows_have_images(written):
    model = written("gemma3")
    assert load(settings(images=False), model.tokenizer, model.config, str(model.folder)) is None
    loaded = load(settings(), model.tokenizer, model.config, str(model.folder))
    assert loaded.identity() == model.processor.identity() and loaded.image_token == "<start_of_image>"
    named = settings(processor_name_or_path=str(model.folder))
    assert load(named, model.tokenizer, model.config, "elsewhere").identity() == loaded.identity()


def test_a_model_that_is_not_proven_is_refused(written):
    model, config = written("gemma3"), SimpleNamespace(model_type="mllama", vision_config={})
    with pytest.raises(UserError, match="mllama") as caught:
        load(settings(), model.tokenizer, config, str(model.folder))
    assert caught.value.place == "recipe.yaml: model_name_or_path" and "qwen2_5_vl" in caught.value.cure


@pytest.mark.parametrize("kind, other", [("gemma3", "PaliGemmaProcessor"), ("llava/pixtral", "LlavaProcessor")])
def test_files_of_another_processor_are_refused(kind, other, written, tmp_path, mistake):
    """LLaVA's own would write Pixtral's images as squares, without the ends of rows."""
    model = written(kind)
    folder = changed(model, tmp_path, "processor_config.json", processor_class=other)
    assert other in mistake(read_processor, "model", str(folder), None, model.config, model.tokenizer)


def test_a_model_without_files_of_a_processor_is_refused(written, tmp_path):
    model = written("gemma3")
    shutil.copy(model.folder / "config.json", tmp_path)
    with pytest.raises(UserError, match="no processor of images") as caught:
        read_processor("model", str(tmp_path), None, model.config, model.tokenizer)
    assert "processor_name_or_path" in caught.value.cure


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_tokenizer_without_the_tokens_of_images_is_refused(kind, written, mistake):
    from transformers import AutoTokenizer

    from brigade.train.data import builtin

    other = AutoTokenizer.from_pretrained(builtin.TOKENIZER)
    assert "tokenizer" in mistake(
        lambda: read_processor("model", str(written(kind).folder), None, written(kind).config, other)
    )


# ---- features --------------------------------------------------------------------------------------------------------
def load_own(folder):
    settings = flags.load(["--model_name_or_path", str(folder), "--images", "true"])
    return features.load_checked(settings, AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_processor_writes_as_many_tokens_as_there_are_features(kind, written):
    assert load_own(written(kind).folder).image_token_id == written(kind).processor.image_token_id


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
    message = mistake(load_own, folder)
    assert said in message and "flag --model_name_or_path" in message


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "llava", "llava_onevision",
                                        "mistral3", "llama4"])  # fmt: skip
def test_the_tiny_model_is_tiny_whatever_the_size_of_the_tower(model_type):
    """Each rank builds it, so that a tower of its published size would take gigabytes and half a minute (Qwen2-VL's)."""
    tiny = trial.tiny_model(AutoConfig.for_model(model_type), images=True)
    assert sum(parameter.numel() for parameter in tiny.parameters()) < 2e7
