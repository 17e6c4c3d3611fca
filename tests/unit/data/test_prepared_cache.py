"""The prepared data's cache: what changes the samples changes the fingerprint, and parallel work is the same to the byte."""

import copy
import multiprocessing
import os
import pickle
import shutil

import numpy as np
import pytest

from brigade.errors import console
from brigade.train.data import build as building
from brigade.train.data import collate, encode, layout, rows, tokenise
from brigade.train.data import prepare as preparing
from brigade.train.host import cache as caches
from brigade.train.host import checksums
from brigade.train.host.cache import cache_directory
from brigade.train.host.checksums import DamagedFile, write_manifest
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
    prints = [building.plan(load(data=plain), tokenizer)[2]]
    assert prints == [building.plan(load(data=changed, training=training), tokenizer)[2]]


def test_a_tokenizer_that_was_used_is_the_same(load, tokenizer, write):
    settings = load(data={"dataset_name": None, "train_file": write("a.jsonl", chats("a", 9))})
    before = building.plan(settings, tokenizer)[2]
    used = copy.deepcopy(tokenizer)
    used(["a", "b c d"], padding=True, truncation=True, max_length=8)
    assert building.plan(settings, used)[2] == before


def _rewrite(name, change):
    """What changes the content of a file of the store, and leaves its size and times alone where they are not its point."""

    def damage(folder, other):
        file = folder / name
        file.write_bytes(change(file.read_bytes()))

    return damage


def _minus_three(content):
    return (np.frombuffer(content, np.int32) - 3).tobytes()


def _swap(folder, other):
    for place, name in ((folder, "ours"), (other, "theirs")):
        (place / "tokens").rename(folder.parent / name)
    (folder.parent / "ours").rename(other / "tokens")
    (folder.parent / "theirs").rename(folder / "tokens")


def _replace(folder, other):
    for path in other.iterdir():
        shutil.copy(path, folder / path.name)


def _leave_times(folder, other):
    """As a bad disk does: nothing but the bytes changes."""
    file = folder / "tokens"
    times = file.stat()
    file.write_bytes(_minus_three(file.read_bytes()))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _other_format(folder, other):
    meta = folder / layout.META
    meta.write_text(meta.read_text().replace(f'"format": {layout.FORMAT}', f'"format": {layout.FORMAT - 1}'))
    write_manifest(folder, folder.name)


DAMAGE = {
    "each token less 3": (_rewrite("tokens", _minus_three), "tokens is not what was written"),
    "the same, with its old times": (_leave_times, "tokens is not what was written"),
    "half of it": (_rewrite("tokens", lambda content: content[: len(content) // 8 * 4]), "tokens has"),
    "an odd half": (_rewrite("tokens", lambda content: content[: len(content) // 2 - 1]), "tokens has"),
    "bytes more": (_rewrite("tokens", lambda content: content + b"1234"), "tokens has"),
    "no bytes": (_rewrite("tokens", lambda content: b""), "tokens has 0 bytes"),
    "another mask": (_rewrite("supervised", lambda content: b"\1" * len(content)), "supervised is not"),
    "gone": (lambda folder, other: (folder / "begins.npy").unlink(), "begins.npy is missing"),
    "an index that leads outside": (_rewrite("begins.npy", lambda content: content[:-8] + (2**40).to_bytes(8, "little")),
                                     "begins.npy is not"),
    "other samples": (_rewrite("train.samples.npy", lambda content: content[:-8] + bytes(8)), "train.samples.npy is not"),
    "another cache's tokens": (_swap, "tokens"),
    "another cache's files": (_replace, ".manifest.json is that of"),
    "half of its figures": (_rewrite("meta.json", lambda content: content[: len(content) // 2]), "meta.json has"),
    "a list of its figures": (_rewrite("meta.json", lambda content: b"[]".ljust(len(content))), "meta.json is not"),
    "a manifest by hand": (_rewrite(".manifest.json", lambda content: content.replace(b": ", b":  ")), ".manifest.json is"),
    "half a manifest": (_rewrite(".manifest.json", lambda content: content[: len(content) // 2]), ".manifest.json is not"),
    "no manifest": (lambda folder, other: (folder / ".manifest.json").unlink(), ".manifest.json is missing"),
    "a pipe": (lambda folder, other: ((folder / "tokens").unlink(), os.mkfifo(folder / "tokens")), "tokens is missing"),
    "a file": (lambda folder, other: (shutil.rmtree(folder), folder.write_text("")), ".manifest.json is missing"),
    "another version": (_other_format, "another version of Brigade wrote it"),
}  # fmt: skip


def test_what_is_damaged_is_made_anew_and_never_trained_on(prepare, write, capsys, cache):
    data, others = ({"train_file": write(f"{name}.jsonl", chats(name, 9))} for name in "ab")
    prepared, other = prepare(**data), prepare(**others).folder
    folder, first = prepared.folder, [row["input_ids"].tolist() for row in prepared.train]
    assert not capsys.readouterr().err
    for kind, (damage, words) in DAMAGE.items():
        damage(folder, other)
        again = prepare(**data)
        assert [row["input_ids"].tolist() for row in again.train] == first and again.facts == prepared.facts, kind
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{folder}: {words}") and line.endswith("it is made anew."), (kind, line)
        assert {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"} == {folder.name, other.name}


def test_a_store_that_is_damaged_while_it_is_read_ends_the_run(prepare, write):
    """As by a disk, after it was opened: at the first of its blocks that is read, also in a process that loads batches."""
    data = {"train_file": write("a.jsonl", chats("a", 9))}
    prepared = prepare(**data)
    tokens = prepared.folder / "tokens"
    with tokens.open("r+b") as file:
        file.write(b"1234")
    for samples in (prepared.train, pickle.loads(pickle.dumps(prepared.train))):
        micro_batch = collate.CarriesErrors(None)(collate.WithFiller(samples, 0).__getitems__([0]))
        with pytest.raises(DamagedFile, match="tokens is not what was written from byte 0 on") as error:
            collate.drawn(micro_batch)
        assert error.value.place == str(prepared.folder) and error.value.whose == "passing"
        assert "start again: it is made anew" in error.value.cure


def test_a_copy_is_read_whole_once_and_then_in_samples(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(checksums, "BLOCK", 64)
    folder = caches.once(
        cache_directory("prepared") / "data", lambda aside: (aside / "tokens").write_bytes(bytes(64 * 1000))
    )
    reads = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: (reads.append(args), real(*args))[1])

    def read():
        reads.clear()
        assert not caches.flaw(folder)
        return len(reads)

    assert read() == caches.SAMPLED
    os.utime(folder / "tokens")
    assert (read(), read()) == (1000, caches.SAMPLED)
    folder.chmod(0o500)
    assert read() == caches.SAMPLED, "nothing is written to it"
    folder.chmod(0o700)


def test_what_is_remembered_is_what_was_found(cache):
    caches.remembered("key", lambda: "text")
    caches.remembered("other", lambda: "more")
    one, other = (cache / "digests").iterdir()
    for damage in (lambda: one.write_text(one.read_text().replace("text", "tent").replace("more", "most")),
                   lambda: one.write_text(other.read_text()), lambda: one.write_text(""), lambda: one.write_text("[]"),
                   lambda: one.write_text(one.read_text()[:40])):  # fmt: skip
        damage()
        assert caches.remembered("key", lambda: "text") == "text"
        assert caches.remembered("other", lambda: "more") == "more"


def _prepare_at_once(caches_folder, began, ended):
    def build(aside):
        began.put(os.getpid())
        (aside / "tokens").write_bytes(b"1234")

    ended.put(caches.once(caches_folder, build).joinpath("tokens").read_bytes())


def test_one_of_two_processes_makes_a_damaged_folder_anew(cache):
    folder = caches.once(cache_directory("prepared") / "data", lambda aside: (aside / "tokens").write_bytes(b"1234"))
    (folder / "tokens").write_bytes(b"4321")
    fork = multiprocessing.get_context("fork")
    began, ended = fork.SimpleQueue(), fork.SimpleQueue()
    both = [fork.Process(target=_prepare_at_once, args=(folder, began, ended)) for _ in range(2)]
    for each in both:
        each.start()
    assert [ended.get(), ended.get()] == [b"1234"] * 2 and began.get() in {each.pid for each in both} and began.empty()
    for each in both:
        each.join()


def test_parallel_equals_serial_byte_for_byte(load, tokenizer, write, monkeypatch, capsys):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
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
    file = write("a.jsonl", [*chats("a", 40), {"messages": []}, *chats("b", 40)])
    assert f"{file}, line 41" in mistake(prepare, train_file=file, dataset_num_proc=2)
