"""Data is encoded once per content, by one process of a host, whole or not at all."""

import copy
import json
import os
import time

import pytest

from brigade.train.data import build as building
from brigade.train.data import prepare as preparing
from testing.chats import CHATML, CHATS, HELD, chat, same


def test_what_was_encoded_is_read_back(prepare, monkeypatch):
    first = prepare()
    monkeypatch.setattr(building, "_store", lambda *_: pytest.fail("encoded again"))
    again = prepare()
    assert again.fingerprint == first.fingerprint and (again.cut, again.dropped) == (first.cut, first.dropped)
    assert same(again.train, first.train) and same(again.heldout, first.heldout)


def test_other_rows_words_or_templates_change_the_fingerprint(prepare, tmp_path, tokenizer):
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.read_text().replace("<|im_start|>", "<|im_start|> "))
    more_words = copy.deepcopy(tokenizer)
    more_words.add_tokens(["number"])
    data = [
        prepare(),
        prepare([*CHATS, chat("a", "b")]),
        prepare([*CHATS[:-1], chat("What is 19?", "The number 20.")]),
        prepare(CHATS[::-1]),
        prepare(CHATS, HELD),
        prepare(CHATS, CHATS[:3]),
        prepare(chat_template=str(template)),
        prepare(tokenizer=more_words),
        prepare(skip_bad_rows=True),
    ]
    assert len({one.fingerprint for one in data}) == len(data)


def test_an_encoding_that_was_killed_is_done_again(prepare, cache, monkeypatch):
    real = building.Writer.close

    def killed(self):
        real(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(building.Writer, "close", killed)
        prepare()
    assert not [path for path in (cache / "prepared").iterdir() if path.is_dir()]
    assert len(prepare().train) == 19


def test_two_processes_at_once(prepare, load, tokenizer, monkeypatch, tmp_path):
    real, said = building._store, tmp_path / "said"

    def slow(*arguments):
        with said.open("a") as file:
            file.write("encodes\n")
        time.sleep(0.3)
        return real(*arguments)

    monkeypatch.setattr(building, "_store", slow)
    prepare(CHATS[:3])  # every library is at work by now, so that the children do not import
    said.unlink()
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(c) + "\n" for c in CHATS))
    asked = load(data={"dataset_name": None, "train_file": str(tmp_path / "both.jsonl")})
    children = []
    for _ in range(2):
        if not (child := os.fork()):
            code = 1
            try:
                code = 0 if len(preparing.prepare(asked, tokenizer).train) == 19 else 3
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert said.read_text() == "encodes\n"
