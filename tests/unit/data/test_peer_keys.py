"""Keys of other tools' data sets: each is read, refused, or counted as not read, as docs/evidence/peer-keys.md says."""

import copy
import functools

import pytest

from benchmarks.peer_keys import CASES, PREFERENCES
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.layout import TEMPLATES
from brigade.train.data.rows import RowChunk


@pytest.fixture(scope="module")
def encode(tokenizer):
    """encode(row, columns, template, rows): the row's chunk, encoded."""

    @functools.cache
    def machine(template, rows):
        text = (TEMPLATES / f"{template}.jinja").read_text()
        backend = tokenizer.backend_tokenizer.to_str()
        return LoadedEncoder(Encoder(backend, ChatTemplates(text), {}, tokenizer.eos_token_id, 4096, True, rows=rows))

    def call(row, columns=None, template="chatml", rows="answers"):
        return machine(template, rows).encode(RowChunk([copy.deepcopy(row)], "here", 1, 1, None), columns or {})

    return call


def supervised(tokenizer, found):
    """The supervised parts, each without the token that ends it."""
    parts, before = [], False
    for token, own in zip(found.tokens.tolist(), found.supervised.tolist(), strict=True):
        parts += [[]] * (own and not before)
        parts[-1:] = [[*parts[-1], token]] if own else parts[-1:]
        before = own
    return [tokenizer.decode(part).removesuffix("<|im_end|>") for part in parts]


@pytest.mark.parametrize("case", [*CASES, *PREFERENCES], ids=lambda case: f"{case['by']} {case['key']}"[:60])
def test_a_key_of_another_tool(encode, tokenizer, case):
    found = encode(case["row"], case.get("columns"), case.get("template", "chatml"), case.get("rows", "answers"))
    if case["is"] == "refused":
        ((_, error),) = found.bad
        problem, cure = error.args
        assert case["says"] in problem and cure
        return
    assert not found.bad, found.bad[0][1].args
    unread = found.unread[found.samples["unread"][0]]
    counted = case["says"] if case["is"] == "ignored" else case.get("ignored", "")
    assert ", ".join(unread) == counted
    text = tokenizer.decode(found.tokens)
    assert all(part in text for part in case.get("text", [])), text
    if "learned" in case:
        assert supervised(tokenizer, found) == case["learned"]
    if case.get("rows", "answers") != "answers":
        assert found.samples["desirable"].tolist() == case.get("labels", [True, False])
