"""Rows become the tokens that each model's own processor makes of them, and the processor that is saved with a model reads
images as training did, limits of pixels among them."""

import copy
import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from brigade.train.data.image_store import ImageWriter, StoredImages
from brigade.train.data.images import ImageReader, ImageRules, ImageSource
from brigade.train.data.prepare import prepare
from brigade.train.data.store import IGNORED
from brigade.train.host.checksums import write_manifest
from brigade.train.model import processor_files
from brigade.train.model.images import saved
from brigade.train.model.images.load import load
from brigade.train.model.images.processor import BLANKS
from brigade.train.recipe.images import within
from testing.vision_configs import MODELS
from testing.vision_kinds import KINDS


def own_processor(model, **pixels):
    """The run's own processor, as load() makes it for a recipe with these limits."""
    names = {"max_pixels": None, "min_pixels": None} | pixels
    recipe = {"data": {"images": True} | names, "model": {"processor_name_or_path": None, "revision": None}}
    recipe["model"]["model_name_or_path"] = str(model.folder)
    sections = SimpleNamespace(**{name: SimpleNamespace(**keys) for name, keys in recipe.items()})
    settings = SimpleNamespace(recipe=sections, place=lambda key: f"recipe.yaml: {key}")
    return load(settings, model.tokenizer, model.config, str(model.folder)), settings


def written_to(folder, model, settings):
    """A directory with the tokenizer's and the processor's files of a saved model."""
    folder.mkdir()
    model.tokenizer.save_pretrained(folder)
    processor_files.write(processor_files.read(settings), folder)
    return folder


def clear(width, height):
    """A picture of noise, the half of it transparent, as the bytes of a file."""
    image, file = Image.effect_noise((width, height), 90).convert("RGBA"), io.BytesIO()
    image.putalpha(Image.effect_noise((width, height), 120))
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def prepared(tmp_path):
    """prepared(processor, rules): a folder with the images of a run's data."""

    def call(processor, rules):
        reader = ImageReader(ImageRules(fetch=False) if processor.scales else rules, tmp_path)
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        writer = ImageWriter(folder)
        writer.add([(reader.read({"bytes": clear(90, 50)}),)])
        writer.close()
        write_manifest(folder, folder.name)
        return folder

    return call


LIMITS = [{}, {"max_pixels": 900}, {"min_pixels": 1600}, {"max_pixels": 100}, {"min_pixels": 4000, "max_pixels": 4200}]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_what_is_saved_reads_an_image_as_training_did(kind, written, tmp_path, prepared):
    model = written(kind)
    for number, limits in enumerate(LIMITS):
        processor, settings = own_processor(model, **limits)
        rules = ImageRules(limits.get("max_pixels"), limits.get("min_pixels"))
        folder = written_to(tmp_path / str(number), model, settings)
        assert saved.difference(folder, prepared(processor, rules), processor, model.tokenizer) == ""
        if kind == "qwen2_5_vl":
            assert prepared_size(limits, processor) <= limits.get("max_pixels", 10**9)


def prepared_size(limits, processor):
    """How many pixels of an image the tower sees."""
    grid = processor.tensors([Image.new("RGB", (90, 50))])["image_grid_thw"][0]
    pixels = int(grid.prod()) * 4**2
    for size in BLANKS:  # which have been expanded before anybody asks
        alone = processor.tensors([Image.new("RGB", size)])["image_grid_thw"][0]
        assert processor.expansion(*size).count(processor.image_token) == int(alone.prod()) // 4
    assert pixels >= limits.get("min_pixels", 0) or "max_pixels" in limits
    return pixels


def test_a_difference_is_named(written, tmp_path, prepared, monkeypatch):
    model = written("qwen2_5_vl")
    limits = ImageRules(max_pixels=900)
    processor, settings = own_processor(model, max_pixels=900)
    data = prepared(processor, limits)
    without = written_to(tmp_path / "without", model, own_processor(model)[1])  # as if limits were not saved
    assert "makes 28 tokens of the image in the data, 90 x 50 pixels, which were" in saved.difference(
        without, data, processor, model.tokenizer
    )
    good = written_to(tmp_path / "good", model, settings)
    other = shutil.copytree(good, tmp_path / "other")
    file = other / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.2, 0.3]}))
    assert "pixel_values of the image" in saved.difference(other, data, processor, model.tokenizer)
    (other / "preprocessor_config.json").unlink()
    assert "no processor of images" in saved.difference(other, data, processor, model.tokenizer)
    monkeypatch.setattr("brigade.train.data.images.in_rgb", lambda image: image.convert("RGB"))  # alpha left out
    assert "differ from those in training" in saved.difference(good, data, processor, model.tokenizer)


@pytest.mark.parametrize("content", [
    {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 1, "max_pixels": 9,
     "size": {"max_pixels": 9, "min_pixels": 1}},
    {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}},
])  # fmt: skip
def test_limits_stand_where_transformers_reads_them(content):
    values = json.loads(processor_files.limited(json.dumps(content).encode(), 7, 5))
    found = values.get("image_processor", values)
    assert found["size"] == {"shortest_edge": 5, "longest_edge": 7}
    assert [found[name] for name in ("min_pixels", "max_pixels") if name in found] in ([], [5, 7])


@pytest.mark.parametrize("own, rules, limits", [
    ((4, 90), (None, None), (4, 90)), ((4, 90), (50, None), (4, 50)), ((4, 90), (2, None), (2, 2)), ((4, 90), (None, 9), (9, 90)),
    ((4, 90), (None, 99), (99, 99)), ((4, 90), (60, 50), (50, 60)),
])  # fmt: skip
def test_limits_of_recipe_and_processor(own, rules, limits):
    assert within(own, *rules) == limits


def test_an_image_that_is_scaled_before_is_compared_first(tmp_path):
    def source(name, **how):
        return ImageSource(name, name.encode(), 1, 1, digest=bytes(16), **how)

    writer = ImageWriter(tmp_path)
    writer.add([(source("a"),), (), (source("b", scaled=True), source("c"))])
    assert writer.counts().tolist() == [1, 0, 2] and writer.scaled().tolist() == [0, 0, 1]
    writer.close()
    write_manifest(tmp_path, tmp_path.name)
    assert StoredImages(tmp_path).one().content == b"b"


# ---- samples ---------------------------------------------------------------------------------------------------------
SIZES = {"a.png": (32, 16), "b.png": (16, 48), "c.png": (40, 40)}


def asked(*parts):
    images = [{"type": "image", "image": part} if part in SIZES else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": images}


def answer(words):
    return {"role": "assistant", "content": [{"type": "text", "text": words}]}


CHATS = [
    [asked("a.png", "What is it?"), answer("A dog.")],
    [asked("How are you?"), answer("Well.")],
    [asked("Is ", "b.png", " in ", "c.png", "?"), answer("No."), asked("And this?", "a.png"), answer("It is.")],
]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_what_the_models_processor_makes(kind, written, load, tmp_path, own_cache):
    pictures = {name: Image.effect_noise(size, 90).convert("RGB") for name, size in SIZES.items()}
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    most = written(kind).processor.most_images or 3
    chats = [chat for chat in CHATS if sum("image" in part for turn in chat for part in turn["content"]) <= most]
    content = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "rows.jsonl").write_text(content)
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": CHATS[1]}))
    data = {"dataset_name": None, "train_file": str(tmp_path / "rows.jsonl"), "chat_template": None, "images": True}
    own = written(kind)
    settings = load(data=data | {"validation_file": str(tmp_path / "held.jsonl")})
    samples = prepare(settings, copy.deepcopy(own.tokenizer), own.processor).train
    assert len(samples) == len(chats)
    for sample, chat in zip(samples, chats, strict=True):
        text = own.tokenizer.apply_chat_template(chat, tokenize=False)
        names = [part["image"] for turn in chat for part in turn["content"] if "image" in part]
        images = {"images": [pictures[name] for name in names]} if names else {}
        ids = own.processor.own(text=[text], **images)["input_ids"][0]
        assert sample["input_ids"].tolist() == list(ids)
        pairs = zip(sample["images"], names, strict=True)
        assert all(np.array_equal(image.open(), pictures[name]) for image, name in pairs)
        answers = [turn["content"][0]["text"] for turn in chat if turn["role"] == "assistant"]
        learned = own.tokenizer.decode([int(label) for label in sample["labels"] if label != IGNORED])
        end = MODELS[kind]["end"]
        assert [part.strip() for part in learned.split(end)] == [*answers, ""]


def test_an_image_that_the_processor_does_not_take_names_its_file_and_row(
    written, load, tmp_path, own_cache, user_error
):
    """Qwen's take none that is more than 200 times as long as wide; skip_bad_rows leaves such a row out."""
    Image.new("RGB", (1, 900)).save(tmp_path / "thin.png")
    Image.new("RGB", (90, 90)).save(tmp_path / "fine.png")
    rows = [[pictured(tmp_path / "fine.png"), answer("Well.")], [pictured(tmp_path / "thin.png"), answer("A line.")]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": CHATS[1]}).replace("Well", "Ill"))
    data = {"dataset_name": None, "train_file": str(tmp_path / "rows.jsonl"), "chat_template": None, "images": True}
    data |= {"validation_file": str(tmp_path / "held.jsonl")}
    own = written("qwen3_vl")
    raised = user_error(prepare, load(data=data), copy.deepcopy(own.tokenizer), own.processor)
    assert raised.place.endswith("rows.jsonl, line 2") and "thin.png" in raised.problem
    assert "1 x 900 pixels: absolute aspect ratio" in raised.problem
    prepared = prepare(load(data=data | {"skip_bad_rows": True}), copy.deepcopy(own.tokenizer), own.processor)
    assert len(prepared.train) == 1


def pictured(path):
    return {"role": "user", "content": [{"type": "image", "image": str(path)}]}
