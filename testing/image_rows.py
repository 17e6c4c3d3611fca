"""Rows with images of the runs of tests, and the flags by which a run trains on them."""

import json
from pathlib import Path
from typing import Any

from . import plain_images
from .command_line import as_flags

HELD_OUT, ROWS = 4, 25  # the first are held out
SINGLE = ("llava_onevision",)  # which reads one image of a sample
SIZES = ((32, 32), (48, 32), (24, 40), (64, 24), (20, 20))  # of images, in pixels
WORDS = ("red", "green", "blue", "circle", "square", "left", "right", "above", "one", "two", "three", "nothing")


def write_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write images and rows, and return these: {"train", "heldout"}."""
    import numpy as np
    from PIL import Image

    draw, rows = np.random.default_rng(3), []
    for number in range(ROWS):
        count = (1, 0, 2, 0, 1, 3, 0, 1)[number % 8]
        paths = []
        for place in range(count):
            width, height = SIZES[int(draw.integers(len(SIZES)))]
            paths.append(f"{number}-{place}.png")
            pixels = draw.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((width, height), 0).save(folder / paths[-1])
        texts = [" ".join(draw.choice(WORDS, int(draw.integers(1, 7)))) for _ in range(count + 1)]
        parts = [{"type": "text", "text": f"{texts[0]} "}]
        for path, text in zip(paths, texts[1:], strict=True):
            parts += [{"type": "image", "image": path}, {"type": "text", "text": f" {text} "}]
        if number % 3 == 0 and paths:  # a question that begins with its image
            parts = parts[1:]
        answer = " ".join(draw.choice(WORDS, int(draw.integers(1, 9))))
        asked: Any = parts if paths else texts[0]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    split = {"train": rows[HELD_OUT:], "heldout": [row for row in rows[:HELD_OUT] if images_of(row) < 2]}
    split["train-single"] = [row for row in split["train"] if images_of(row) < 2]
    for name, each in split.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return split


def flags_of(folder: Path, model: str) -> list[str]:
    """Write a model and rows with images, and return the flags by which a run of another recipe trains on them."""
    from .vision_models import write_vision_model

    folder.mkdir(exist_ok=True)
    write_rows(folder)
    train = "train-single" if model in SINGLE else "train"
    files = {"train_file": folder / f"{train}.jsonl", "validation_file": folder / "heldout.jsonl"}
    flags = as_flags(images=True, max_length=512, **{key: str(path) for key, path in files.items()})
    flags += as_flags(tokenizer_name_or_path="null", chat_template="null", from_scratch=False)
    return [*flags, "--model_name_or_path", str(write_vision_model(folder / model, model))]


def images_of(row: dict[str, Any]) -> int:
    """Return how many images a row has."""
    return sum(part["type"] == "image" for part in plain_images.parts_of(row["messages"][0]["content"]))
