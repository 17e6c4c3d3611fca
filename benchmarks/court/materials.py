"""What every trainer is given: tiny random models with a tokenizer and a chat template, and rows, in one folder."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import pages
from testing import runs
from testing.vision_models import write_vision_model

from . import plain
from .questions import HERE, Question, Row, rows_of


def model_of(question: Question, folder: Path) -> Path:
    """Write the model of a question below `folder`, and return where it is."""
    name = question.model + ("-pad" if question.pad_is_eos else "")
    path = folder / "models" / name
    if (path / "config.json").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if question.kind == "image":
        write_vision_model(path, question.model)
        return _with_settings(path, bos_token="<bos>")  # which its template writes
    if question.model == "smollm2":
        _write_smollm2(path)
    else:
        runs.write_model(path, "llama" if question.model == "tied" else question.model)
        if question.model == "tied":
            _tie(path)
    shutil.copy(HERE / "court.jinja", path / "chat_template.jinja")
    more = {"pad_token": "<|im_end|>"} if question.pad_is_eos else {}
    return _with_settings(path, **more)


def write_rows(question: Question, folder: Path) -> Path:
    """Write the rows of a question, of images with their pictures, and return the file. Beside it lie two rows more, for trainers
    that hold rows out."""
    path = folder / "rows" / f"{question.rows}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = rows_of(question)
    if question.kind == "image":
        rows = [_with_picture(row, number, path.parent) for number, row in enumerate(rows)]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    held_out = ("!".join(line.rsplit(".", 1)) for line in lines[:2])
    path.with_suffix(".heldout.jsonl").write_text("".join(f"{line}\n" for line in held_out))
    return path


def write_tokens(question: Question, model: Path, file: Path) -> Path:
    """Write the rows of a chat or a text as the oracle reads them, for a trainer that is given labels."""
    path = file.with_suffix(f".{model.name}.json")
    if question.kind in ("chat", "text"):
        samples = plain.samples(question, pages.read(file), model)
        path.write_text(json.dumps([{"input_ids": sample.ids, "labels": sample.labels} for sample in samples]))
    return path


def _with_settings(path: Path, **more: str) -> Path:
    """Write a tokenizer's settings, and more of them, as releases of Transformers before 5 know them, too."""
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"} | more
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [])  # of which they want no list
    file.write_text(json.dumps(settings))
    return path


def _with_picture(row: Row, number: int, folder: Path) -> Row:
    import numpy as np
    from PIL import Image

    width, height = row["size"]
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height), 0).save(folder / f"{number}.png")
    asked = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": row["text"]}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": row["answer"]}]}


def _tie(path: Path) -> None:
    config = AutoConfig.from_pretrained(path, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


def _write_smollm2(path: Path) -> None:
    from brigade.train.model.location import location
    from brigade.train.recipe import flags

    directory = location(flags.load(["--recipe", "recipes/smollm2-135m/full.yaml"]))
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(directory).save_pretrained(path)
