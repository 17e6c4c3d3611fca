"""The built-in data set: questions about Python's standard library, and a small tokenizer that was trained on them.

Source and licence stand in python_docs/README.md.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from ..recipe.objectives import PAIRS

BUILT_IN = "python-docs"  # its name in recipes, as a data set and as a tokenizer
_FOLDER = Path(__file__).with_name("python_docs")
TRAIN, HELDOUT = _FOLDER / "train.jsonl", _FOLDER / "heldout.jsonl"  # a line: {"messages": [user's, assistant's]}
TOKENIZER = _FOLDER / "tokenizer"  # a directory that AutoTokenizer.from_pretrained loads


def write_preferences(file: Path, rows: str, count: int) -> None:
    """Write rows of preferences for trials, made from the built-in data: a question's own answer is the better one, and the next
    question's answer is the worse one. rows: PAIRS, or JUDGED, where every other row has the worse one"""
    with TRAIN.open() as lines:
        chats = [json.loads(next(lines))["messages"] for _ in range(count + 1)]
    with file.open("w") as out:
        for number, ((question, answer), (_, other)) in enumerate(itertools.pairwise(chats)):
            row: dict[str, Any] = {"prompt": [question], "chosen": [answer], "rejected": [other]}
            if rows != PAIRS:
                row = {
                    "prompt": [question],
                    "completion": [other if number % 2 else answer],
                    "label": not number % 2,
                }
            out.write(json.dumps(row) + "\n")
