"""What the tests of prepared data share: a cache of their own, files of rows, and what is prepared from them."""

import json

import pytest

from brigade.train.data import prepare as preparing


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BRIGADE_CACHE", str(folder))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as train.py does: this process may have tokenised before
    return folder


@pytest.fixture
def write(tmp_path):
    def call(name, content):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(tmp_path / name)

    return call


@pytest.fixture
def prepare(load, tokenizer):
    def call(training=None, tokenizer=tokenizer, processor=None, **data):
        settings = load(data={"dataset_name": None} | data, training=training or {})
        return preparing.prepare(settings, tokenizer, processor)

    return call


@pytest.fixture
def from_rows(prepare, write):
    """The samples of these rows, in order."""

    def call(*content, **data):
        held = {"validation_file": write("held.jsonl", [{"text": "held out"}])}
        return prepare(train_file=write("train.jsonl", content), **held | data)

    return call
