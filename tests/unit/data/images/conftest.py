"""What the tests of images share: a tokenizer that knows them, files, and rows that become samples."""

import copy

import pytest

from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.images import ImageRules
from brigade.train.data.rows import RowChunk
from testing.images import SMALL, TEMPLATE, WIDE, Processor, encoded, with_images


@pytest.fixture(scope="module")
def knowing(tokenizer):
    return with_images(copy.deepcopy(tokenizer))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(*SMALL))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jpg").write_bytes(encoded(*WIDE, "JPEG", "L"))
    return tmp_path


@pytest.fixture
def encode(knowing, folder):
    """encode(row, template, columns, max_length=, truncation=, rules=, image_folder=): the row, as one of rows.jsonl."""

    def call(row, template=TEMPLATE, columns=None, max_length=4096, truncation=True, rules=None, image_folder=None):
        how = {"images": Processor(knowing), "image_rules": rules or ImageRules()}
        templates, backend = ChatTemplates(template, joins=not template), knowing.backend_tokenizer.to_str()
        encoder = Encoder(backend, templates, {}, knowing.eos_token_id, max_length, truncation, **how)
        chunk = RowChunk([copy.deepcopy(row)], str(folder / "rows.jsonl"), 1, 1, None)
        return LoadedEncoder(encoder).encode(chunk, columns or {}, image_folder)

    return call


@pytest.fixture
def shown(knowing):
    """shown(found): the sample's text, what of it is learned, and the sizes of its images."""

    def call(found):
        assert not found.bad, found.bad[0][1].args
        learned = knowing.decode(found.tokens[found.supervised])
        sizes = [(image.width, image.height) for images in found.images for image in images]
        return knowing.decode(found.tokens), learned, sizes

    return call


@pytest.fixture
def problem():
    """problem(found): why the row cannot be used."""

    def call(found):
        ((_, error),) = found.bad
        said, cure = error.args
        assert cure
        return said

    return call
