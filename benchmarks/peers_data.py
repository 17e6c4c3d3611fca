"""What benchmarks/peers.py trains on: dialogues of realistic lengths, and a small Llama with realistic proportions.

Nothing is downloaded. The dialogues are made of the built-in questions and answers, several per dialogue; their number
is drawn from a lognormal distribution, which is how the lengths of collected chats spread (most are short, a few fill
the context). The same Python writes the same file.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DIALOGUES, HELD_OUT = 2000, 16
MEDIAN_PAIRS, SPREAD = 3.5, 0.8  # of the lognormal: median, and standard deviation of the logarithm
MOST_PAIRS = 40  # some 2,500 tokens: past max_length, so that truncation takes part
SEED = 20

# Of the 25.8 million parameters the tied embedding has 24 %, and the vocabulary is 43 times the hidden size: between
# Llama-3.2-1B (21 %, 63) and Qwen3-0.6B (26 %, 148). The loss layer then weighs what it weighs in small models that
# people fine-tune. The built-in tokenizer fills 4,096 of the 16,384 rows; the others cost the same and are never right.
MODEL = {
    "vocab_size": 16384,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}

Chat = dict[str, Any]


def dialogues(pairs: Sequence[Chat], count: int, seed: int) -> list[Chat]:
    """`count` chats, each of one or more of the one-answer chats in `pairs`, which are used in a shuffled order, again
    and again. The same arguments give the same chats."""
    draw = random.Random(seed)
    order = list(pairs)
    draw.shuffle(order)
    chats, taken = [], 0
    for _ in range(count):
        turns = min(MOST_PAIRS, max(1, round(draw.lognormvariate(math.log(MEDIAN_PAIRS), SPREAD))))
        messages = [message for at in range(taken, taken + turns) for message in order[at % len(order)]["messages"]]
        chats.append({"messages": messages})
        taken += turns
    return chats


def write_jsonl(path: Path, chats: Iterable[Chat]) -> str:
    """Write one chat a line; returns the file's SHA-256, which names the data in a row of results."""
    text = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats).encode()
    path.write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def write_model(folder: Path) -> int:
    """Random weights in Hugging Face format, the same each time; returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build(folder: Path) -> dict[str, Any]:
    """Write train.jsonl, heldout.jsonl, the model and the tokenizer under `folder`; returns where they lie and what
    they are: {"train", "heldout", "model", "tokenizer", "sha256", "dialogues", "parameters"}."""
    import shutil

    from brigade.train.data import builtin

    folder.mkdir(parents=True, exist_ok=True)
    train = [json.loads(line) for line in builtin.TRAIN.read_text().splitlines()]
    heldout = [json.loads(line) for line in builtin.HELDOUT.read_text().splitlines()]
    digest = write_jsonl(folder / "train.jsonl", dialogues(train, DIALOGUES, SEED))
    write_jsonl(folder / "heldout.jsonl", dialogues(heldout, HELD_OUT, SEED))
    shutil.copytree(builtin.TOKENIZER, folder / "tokenizer", dirs_exist_ok=True)
    parameters = write_model(folder / "model")
    places = {"train": "train.jsonl", "heldout": "heldout.jsonl", "model": "model", "tokenizer": "tokenizer"}
    return {key: str(folder / name) for key, name in places.items()} | {
        "sha256": digest,
        "dialogues": DIALOGUES,
        "parameters": parameters,
    }


def describe(lengths: Sequence[int], supervised: Sequence[int], max_length: int) -> dict[str, Any]:
    """Percentiles of the dialogues' lengths in tokens (nearest rank), and the share of tokens that are supervised.

    lengths: untruncated; supervised: within max_length.
    """
    ranked = sorted(lengths)
    kept = sum(min(length, max_length) for length in lengths)
    return {f"p{percent}": percentile(ranked, percent) for percent in (5, 25, 50, 75, 95, 99, 100)} | {
        "mean": round(sum(ranked) / len(ranked), 1),
        "longer_than_max_length": sum(length > max_length for length in ranked),
        "tokens": kept,
        "supervised_share": round(sum(supervised) / kept, 4),
    }


def percentile(ranked: Sequence[int], percent: float) -> int:
    """The nearest-rank percentile of sorted numbers."""
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]
