"""Tiny random models of images and texts, with tokenizers, processors and chat templates built as their families build them."""

import functools
import json
from pathlib import Path
from typing import Any

from .vision_configs import MODELS


def write_vision_model(folder: Path, model_type: str, divisor: int = 1) -> Path:
    """Write a model of this type with random weights, the same each time, with its tokenizer, processor and chat template.

    model_type: one of MODELS, the tower's behind it where that is named, too; divisor: a number that divides its vocabulary

    It has two layers of 64 and a tower of two layers of 32, in fp32. An image is 4 to 60 tokens, and weights are large enough for
    it to move each logit behind it.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = MODELS[model_type]
    ids = _write_tokenizer(folder, model)
    config = json.loads(json.dumps(model["config"])) | {key: ids[token] for key, token in model["ids"].items()}
    words = len(ids) + 8  # AutoTokenizer adds special tokens of its own to some families' tokenizers
    words += -words % divisor
    known = {
        "vocab_size": words,
        "bos_token_id": None,
        "eos_token_id": ids[model["end"]],
        "pad_token_id": ids["<pad>"],
    }
    config["text_config"] |= known
    if model_type == "gemma4":
        config["text_config"]["vocab_size_per_layer_input"] = words
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForImageTextToText.from_config(
            CONFIG_MAPPING[model_type.partition("/")[0]](**config), dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    made.save_pretrained(folder)
    named = {"processor_class": model["processor"]["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(model["images"] | named))
    (folder / "processor_config.json").write_text(json.dumps(model["processor"]))
    return folder


@functools.cache
def _letters() -> list[str]:
    """A character for each of the 256 bytes, as byte-level BPE writes them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _write_tokenizer(folder: Path, model: dict[str, Any]) -> dict[str, int]:
    """Write a tokenizer of bytes, with the model's special tokens and its chat template; returns token -> id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = model.get("named", {})
    special = ["<pad>", *dict.fromkeys([*model["tokens"], *named.values()])]
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=model["end"], extra_special_tokens=named
    )
    fast.chat_template = model["template"]
    fast.save_pretrained(folder)
    return fast.get_vocab()
