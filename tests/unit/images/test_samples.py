"""Rows become the tokens that each model's own processor makes of them, and only answers are learned."""

import copy
import json

import numpy as np
import pytest
from PIL import Image

from brigade.train.data.prepare import prepare
from brigade.train.data.store import IGNORED
from testing.vision_configs import MODELS
from testing.vision_kinds import KINDS

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
def test_samples_are_what_the_models_processor_makes(kind, written, load, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
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
        assert all(
            np.array_equal(image.open(), pictures[name]) for image, name in zip(sample["images"], names, strict=True)
        )
        answers = [turn["content"][0]["text"] for turn in chat if turn["role"] == "assistant"]
        learned = own.tokenizer.decode([int(label) for label in sample["labels"] if label != IGNORED])
        end = MODELS[kind]["end"]
        assert [part.strip() for part in learned.split(end)] == [*answers, ""]


def test_an_image_that_the_processor_does_not_take_names_its_file_and_row(
    written, load, tmp_path, monkeypatch, user_error
):
    """Qwen's take none that is more than 200 times as long as wide; skip_bad_rows leaves such a row out."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
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
