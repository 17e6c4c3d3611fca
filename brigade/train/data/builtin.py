"""The built-in data set: questions about Python's standard library, and a small tokenizer that was trained on them.

Source and licence stand in python_docs/README.md.
"""

from pathlib import Path

BUILT_IN = "python-docs"  # its name in recipes, as a data set and as a tokenizer
_FOLDER = Path(__file__).with_name("python_docs")
TRAIN, HELDOUT = _FOLDER / "train.jsonl", _FOLDER / "heldout.jsonl"  # a line: {"messages": [user's, assistant's]}
TOKENIZER = _FOLDER / "tokenizer"  # a directory that AutoTokenizer.from_pretrained loads
