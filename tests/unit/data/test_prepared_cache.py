"""The prepared data's cache: what changes the samples changes the fingerprint, and parallel work is the same to the byte."""

import copy
import os

import pytest

from brigade.errors import console
from brigade.train.cache import cache_directory
from brigade.train.data import build as building
from brigade.train.data import encode, rows, tokenise
from brigade.train.data import prepare as preparing
from testing.preparing import chats


@pytest.mark.parametrize("change", [
    {"max_length": 32}, {"packing": True}, {"truncation": False}, {"columns": {"text": "words"}},
    {"validation_split": 0.3}, {"max_train_samples": 5}, {"max_eval_samples": 1}, {"chat_template": "llama3"},
], ids=str)  # fmt: skip
def test_what_changes_the_samples_changes_the_fingerprint(load, tokenizer, write, change):
    data = {"dataset_name": None, "train_file": write("a.jsonl", chats("a", 9))}
    prints = [building.plan(load(data=one), tokenizer)[2] for one in (data, data | change, data)]
    assert prints[0] == prints[2] != prints[1]


def test_weights_and_their_seed_change_it(load, tokenizer, write):
    files = [write(f"{name}.jsonl", chats(name, 9)) for name in "ab"]

    def fingerprint(weights, seed=42):
        sources = [{"train_file": file, "weight": weight} for file, weight in zip(files, weights, strict=True)]
        settings = load(data={"dataset_name": None, "datasets": sources}, training={"seed": seed})
        return building.plan(settings, tokenizer)[2]

    half = fingerprint((0.5, 0.5))
    assert half == fingerprint((0.5, 0.5)) != fingerprint((0.4, 0.6))
    assert half != fingerprint((0.5, 0.5), seed=1) and half != fingerprint((None, None))
    assert fingerprint((None, None)) == fingerprint((None, None), seed=1), "without weights nothing is drawn"


@pytest.mark.parametrize("training", [
    {"global_batch_size": 8}, {"learning_rate": 1.0}, {"padding_free": False}, {"seed": 7}, {"bf16": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("data", [{}, {"dataset_num_proc": 2}], ids=str)
def test_nothing_else_changes_it(load, tokenizer, write, training, data):
    plain = {"dataset_name": None, "train_file": write("a.jsonl", chats("a", 9))}
    changed = plain | data | {"train_file": write("another name.jsonl", chats("a", 9))}
    assert (
        building.plan(load(data=plain), tokenizer)[2]
        == building.plan(load(data=changed, training=training), tokenizer)[2]
    )


def test_a_tokenizer_that_was_used_is_the_same(load, tokenizer, write):
    settings = load(data={"dataset_name": None, "train_file": write("a.jsonl", chats("a", 9))})
    before = building.plan(settings, tokenizer)[2]
    used = copy.deepcopy(tokenizer)
    used(["a", "b c d"], padding=True, truncation=True, max_length=8)
    assert building.plan(settings, used)[2] == before


@pytest.mark.parametrize("damage", [
    lambda text: text.replace(f'"format": {preparing.FORMAT}', f'"format": {preparing.FORMAT - 1}'),
    lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "{}",
], ids=["format", "cut", "empty", "list", "nothing"])  # fmt: skip
def test_a_cache_of_another_version_is_made_anew(prepare, write, capsys, cache, damage):
    data = {"train_file": write("a.jsonl", chats("a", 9))}
    first = [row["input_ids"].tolist() for row in prepare(**data).train]
    (folder,) = (path for path in (cache / "prepared").iterdir() if path.is_dir())
    assert "version" not in capsys.readouterr().err
    meta = folder / preparing.META
    meta.write_text(damage(meta.read_text()))
    (folder / "tokens").write_bytes(b"")  # whatever another version made of it
    again = prepare(**data)
    assert [row["input_ids"].tolist() for row in again.train] == first
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line and "another version of Brigade" in line and "anew" in line
    assert prepare(**data).facts == again.facts and not capsys.readouterr().err


def test_parallel_equals_serial_byte_for_byte(load, tokenizer, write, monkeypatch, capsys):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    monkeypatch.setenv(
        "TOKENIZERS_PARALLELISM", "false"
    )  # as train.py does: this process has tokenised before it forks
    data = {"dataset_name": None, "train_file": write("a.jsonl", chats("a", 80)), "packing": True, "max_length": 64}
    encoder, (origin,), _ = building.plan(load(data=data), tokenizer)
    pids = []
    real = encode.LoadedEncoder.__init__
    monkeypatch.setattr(encode.LoadedEncoder, "__init__", lambda self, e: (pids.append(os.getpid()), real(self, e))[1])
    serial = list(tokenise.encoded(origin.train, {}, encoder, 1))
    assert len(serial) > 10 and len(pids) == 1
    parallel = list(tokenise.encoded(origin.train, {}, encoder, 2))
    assert pids == [os.getpid()] * 2, "all processes share the tokenizer that their parent loaded"
    assert len(parallel) == len(serial)
    for ours, theirs in zip(parallel, serial, strict=True):
        assert ours.after == theirs.after and ours.size == theirs.size
        for key in ("tokens", "supervised", "samples"):
            assert (getattr(ours, key) == getattr(theirs, key)).all()
    # And the files of the whole step.
    contents, said = [], []
    for processes in (1, 2):
        monkeypatch.setattr(console, "BAR_SECONDS", 3600 * (2 - processes))  # before the time is up all is silent
        monkeypatch.setenv("BRIGADE_CACHE", str(cache_directory() / str(processes)))
        prepared = preparing.prepare(load(data=data | {"dataset_num_proc": processes}), tokenizer)
        contents.append({path.name: path.read_bytes() for path in prepared.train.folder.iterdir()})
        said.append(capsys.readouterr().err.splitlines())
    assert said[0] == [] and len(said[1]) > 10 and all(line.startswith("tokenising a.jsonl: ") for line in said[1])
    assert contents[0] == contents[1] and len(contents[0]) >= 8


def test_a_mistake_in_a_later_chunk_is_told_from_another_process(prepare, write, monkeypatch, mistake):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    file = write("a.jsonl", [*chats("a", 40), {"messages": []}, *chats("b", 40)])
    assert f"{file}, line 41" in mistake(prepare, train_file=file, dataset_num_proc=2)
