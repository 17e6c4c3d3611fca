"""How byte-level BPE tokenizers split a text before they merge bytes, by the names that llama.cpp has for it."""

from typing import Any, NamedTuple

from ...errors.tables import Document

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = "digits"  # each digit for itself


class Splits(NamedTuple):
    """steps: before bytes, DIGITS or a regular expression; by_gpt2: then by GPT-2's; ignore_merges: not for whole words of the
    vocabulary"""

    steps: tuple[str, ...]
    by_gpt2: bool
    ignore_merges: bool


NAMES = {
    "gpt-2": Splits((), True, False),
    "smollm": Splits((DIGITS,), True, False),
    "llama-bpe": Splits((_CONTRACTIONS + r"\p{N}{1,3}" + _REST,), False, True),
    "qwen2": Splits((_CONTRACTIONS + r"\p{N}" + _REST,), False, False),
}


def name_of(document: Document, ignore_merges: bool) -> str:
    """Return the name for the pre-tokenizer of a tokenizer.json, or "" where none of NAMES does the same."""
    pre = document["pre_tokenizer"] or {}
    *before, last = pre.get("pretokenizers") or [pre]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return ""
    steps = []
    for step in before:
        if step["type"] == "Digits" and step["individual_digits"]:
            steps.append(DIGITS)
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            steps.append(step["pattern"].get("Regex", ""))
        else:
            return ""
    splits = Splits(tuple(steps), last.get("use_regex", True), ignore_merges)
    return next((name for name, known in NAMES.items() if known == splits), "")


def split(backend: Any, name: str) -> None:
    """Let a tokenizers.Tokenizer of byte-level BPE split as one of NAMES does."""
    from tokenizers import Regex, pre_tokenizers

    steps, by_gpt2, ignore_merges = NAMES[name]
    before = [
        pre_tokenizers.Digits(individual_digits=True)
        if step == DIGITS
        else pre_tokenizers.Split(Regex(step), "isolated")
        for step in steps
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    backend.model.ignore_merges = ignore_merges
