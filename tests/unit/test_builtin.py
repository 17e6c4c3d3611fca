"""Tests of the built-in data set and its tokenizer."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.data import builtin, layout

# The same command trains on the same data wherever it runs: whoever changes a file changes losses that documents quote.
FILES = {
    "train.jsonl": "3c16ea5830a36d84306bb06d231876680cf626ec376cd208b30b8c885efb72fa",
    "heldout.jsonl": "658a2cb67cd7e26f930c32a3c092eff87868553f0b1752aac7c783370d53ee0f",
    "tokenizer/tokenizer.json": "52006f7fc20eeeea397bd0d6c4ac6a35c685b9c13fab50610b4e4df478533610",
    "tokenizer/tokenizer_config.json": "0f731cdd22f52a04dec7bf9ab2a3b9b952be1c6d0a49a4e10864d7ce019b55dc",
}


def names(chats):
    return {user["content"].split("`")[1] for user, _ in chats}


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_those_that_were_published(name):
    content = (builtin.TRAIN.parent / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == FILES[name]


def test_source_and_licence_lie_beside_the_files():
    readme, licence = ((builtin.TRAIN.parent / name).read_text() for name in ("README.md", "LICENSE"))
    assert "CPython 3.11.7" in readme
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "ZERO-CLAUSE BSD LICENSE" in licence


def test_the_split_is_disjoint_in_names_and_answers():
    lines = (path.read_text(encoding="utf-8").splitlines() for path in (builtin.TRAIN, builtin.HELDOUT))
    train, heldout = ([json.loads(line)["messages"] for line in part] for part in lines)
    assert not names(train) & names(heldout)
    answers = [assistant["content"] for _, assistant in train + heldout]
    assert len(answers) == len(set(answers))


def test_vocabulary_and_special_tokens(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 4096
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.unk_token is None
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} == set(tokenizer.all_special_tokens)
    assert tokenizer.model_max_length >= 1 << 20
    assert tokenizer.chat_template.strip() == (layout.TEMPLATES / "chatml.jinja").read_text().strip()


@given(st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
