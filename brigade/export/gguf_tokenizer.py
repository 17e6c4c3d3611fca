"""A tokenizer as llama.cpp has it: tokens with their types, merges, the name of the pre-tokenizer, and the chat template."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UserError
from ..train.model import pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType


class Vocabulary(NamedTuple):
    """tokens: by their ids; types: gguf.TokenType of each; merges: pairs with a space between; pre: llama.cpp's name of the
    pre-tokenizer; add_bos, add_eos: whether the tokenizer adds these tokens to a text"""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str
    add_bos: bool
    add_eos: bool


def vocabulary(tokenizer: "PreTrainedTokenizerBase", size: int, place: str, cure: str) -> Vocabulary:
    """Return a fast tokenizer's vocabulary, filled up to the `size` rows of the model's embeddings.

    Raises UserError at `place`, with `cure`, where it is not a byte-level BPE whose pre-tokenizer llama.cpp has by name.
    """

    def refuse(problem: str) -> UserError:
        return UserError(place, f"llama.cpp cannot be given this tokenizer: {problem}", cure)

    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = document["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise refuse(f"its model is {model['type']}, and no plain byte-level BPE")
    odd = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd:
        raise refuse(f"{odd[0]} is {model[odd[0]]!r}")
    pre = pre_tokenizers.name_of(document, bool(model.get("ignore_merges")))
    if not pre:
        raise refuse(
            f"its pre_tokenizer {json.dumps(document['pre_tokenizer'])} is none of {', '.join(pre_tokenizers.NAMES)}"
        )
    normalizer = (document["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise refuse(f"it has a normalizer, {normalizer}")
    tokens = {number: token for token, number in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    for added in document["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise refuse(f"its token {added['content']!r} takes the spaces around it, or only whole words")
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if len(tokens) and max(tokens) >= size:
        raise refuse(f"it has a token {max(tokens)}, and the model's embeddings {size} rows")
    for number in range(size):
        tokens.setdefault(number, f"[PAD{number}]")
        types.setdefault(number, UNUSED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    add_bos, add_eos = _added(tokenizer, refuse)
    order = range(size)
    return Vocabulary([tokens[n] for n in order], [types[n] for n in order], merges, pre, add_bos, add_eos)


def _added(tokenizer: "PreTrainedTokenizerBase", refuse: Callable[[str], UserError]) -> tuple[bool, bool]:
    """Whether the tokenizer puts its first token before a text, and its last one behind it."""
    text = "a"
    bare, whole = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    begin, end = ([token] if token is not None else [] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    for add_bos, add_eos in ((False, False), (True, False), (False, True), (True, True)):
        if whole == [*(begin * add_bos), *bare, *(end * add_eos)]:
            return add_bos, add_eos
    raise refuse(f"it adds tokens to {text!r} that are not its bos_token and eos_token: {whole}")


def without_marks(template: str) -> str:
    """Return a chat template without its generation marks, which llama.cpp's Jinja does not know.

    A comment stands in for each, which takes the same spaces away.
    """
    return _MARK.sub(lambda mark: f"{{#{mark[1]} {mark[2]}#}}", template)
