"""What the tests of encoding share: samples of chats, and saved data sets."""

import json

import pytest

from brigade.train.data import prepare as preparing
from testing.chats import CHATS, only


@pytest.fixture
def prepare(load, tokenizer, tmp_path):
    """prepare(chats, heldout, max_length=...): the samples of such data; chats may be the text of a file."""

    def write(name, chats):
        path = tmp_path / name
        if isinstance(chats, bytes):
            path.write_bytes(chats)
        else:
            path.write_text(chats if isinstance(chats, str) else "".join(json.dumps(c) + "\n" for c in chats))
        return str(path)

    def call(chats=CHATS, heldout=None, tokenizer=tokenizer, **data):
        files = {"dataset_name": None, "train_file": write("train.jsonl", chats)}
        files |= {"validation_file": write("heldout.jsonl", heldout)} if heldout is not None else {}
        return only(preparing.prepare(load(data=files | data), tokenizer))

    return call


@pytest.fixture
def saved(tmp_path):
    from datasets import Dataset, DatasetDict

    def save(name="set", **splits):
        parts = {split: Dataset.from_list(rows) for split, rows in splits.items()}
        whole = parts["train"] if list(parts) == ["train"] else DatasetDict(parts)
        whole.save_to_disk(str(tmp_path / name))
        return str(tmp_path / name)

    return save
