"""Each family's recorded dialogues, its template of ours, and a tokenizer with its special tokens."""

import copy
import json
import re
from pathlib import Path

from brigade.train.data import builtin
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.layout import TEMPLATES
from brigade.train.data.rows import RowChunk

FOLDER = Path(__file__).parents[1] / "tests/data/dialogues"
FAMILIES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
MARKS = re.compile(r"\{%-? *(end)?generation *-?%\}")


def text_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def unmarked(name):
    """Our template of a family without its marks: it renders the recorded dialogues as the official one does."""
    return MARKS.sub(lambda mark: "{%- endif -%}" if mark[1] else "{%- if true -%}", text_of(name))


def tokenizers_of_families():
    """The built-in tokenizer with the special tokens of each family."""
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(builtin.TOKENIZER)

    def load(name):
        tokenizer = copy.deepcopy(plain)
        tokenizer.add_special_tokens(FAMILIES[name]["special_tokens"])
        tokenizer.add_special_tokens({"additional_special_tokens": FAMILIES[name]["added_tokens"]})
        return tokenizer

    return {name: load(name) for name in FAMILIES}


def with_template(tokenizer, template):
    """A copy of a tokenizer, with this template as its own."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def machine(tokenizer, template, **how):
    """The encoder of a tokenizer with this template's text."""
    variables = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    backend, end = tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id
    return LoadedEncoder(Encoder(backend, ChatTemplates(template), variables, end, 10**6, True, **how))


def encoded(loaded, row):
    """What an encoder makes of a row, which stays as it is."""
    return loaded.encode(RowChunk([copy.deepcopy(row)], "here", 1, 1, None), {})
