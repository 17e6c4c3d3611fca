"""What the tests of prepared data share: a cache of their own, files of rows, and what is prepared from them."""

import copy
import functools
import json

import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.layout import TEMPLATES
from brigade.train.data.rows import RowChunk
from brigade.train.recipe.objectives import PAIRS


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


@pytest.fixture(scope="module")
def encode(tokenizer):
    """encode(row, rows, columns, template, ...): the row's chunk, encoded. rows: which an objective reads; template: one of ours,
    the text of another, or none"""

    @functools.cache
    def machine(rows, template, max_length, truncation, **options):
        text = template if "{%" in template else (TEMPLATES / f"{template}.jinja").read_text() if template else ""
        templates, backend = ChatTemplates(text, joins=not template), tokenizer.backend_tokenizer.to_str()
        how = {"rows": rows, **options}
        return LoadedEncoder(Encoder(backend, templates, {}, tokenizer.eos_token_id, max_length, truncation, **how))

    def call(row, rows=PAIRS, columns=None, template="chatml", max_length=4096, truncation=True, **options):
        chunk = RowChunk([copy.deepcopy(row)], "here", 1, 1, None)
        return machine(rows, template or "", max_length, truncation, **options).encode(chunk, columns or {})

    return call


@pytest.fixture
def from_rows(prepare, write):
    """The samples of these rows, in order."""

    def call(*content, **data):
        held = {"validation_file": write("held.jsonl", [{"text": "held out"}])}
        return prepare(train_file=write("train.jsonl", content), **held | data)

    return call
