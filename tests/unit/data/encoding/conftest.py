"""What the tests of encoding share: samples of chats."""

import json

import pytest

from brigade.train.data import prepare as preparing
from testing.chats import CHATS, only


@pytest.fixture
def prepare(load, tokenizer, tmp_path):
    """prepare(chats, heldout, max_length=...): the samples of such data; chats may be the text of a file."""

    def write(name, chats):
        path = tmp_path / name
        path.write_text(chats if isinstance(chats, str) else "".join(json.dumps(c) + "\n" for c in chats))
        return str(path)

    def call(chats=CHATS, heldout=None, tokenizer=tokenizer, **data):
        files = {"dataset_name": None, "train_file": write("train.jsonl", chats)}
        files |= {"validation_file": write("heldout.jsonl", heldout)} if heldout is not None else {}
        return only(preparing.prepare(load(data=files | data), tokenizer))

    return call
