"""Several sources: weights, numbers of samples, and what is held out of each."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brigade.train.data import rows
from testing.preparing import chats, mixed, texts


@pytest.mark.parametrize("sizes, weights, counts", [
    ((10, 20), (None, None), (10, 20)), ((10, 20), (0.5, 0.5), (10, 10)), ((10, 20), (0.25, 0.75), (7, 20)),
    ((100, 4), (0.9, 0.1), (36, 4)), ((30, 30, 30), (0.5, 0.3, 0.2), (30, 18, 12)), ((3, 1000), (0.999, 0.001), (3, 1)),
])  # fmt: skip
def test_weights_are_shares_of_the_training_samples(prepare, write, tokenizer, sizes, weights, counts):
    prepared = mixed(prepare, write, sizes, weights)
    assert prepared.facts["by_source"] == list(counts) and prepared.facts["samples"] == sum(counts)
    found = texts(tokenizer, prepared.train)
    assert len(found) == len(set(found)) == sum(counts), "none is repeated"
    for name, count in zip("abc", counts, strict=False):
        assert sum(f"user\n{name} " in text for text in found) == count
    assert list(prepared.heldout) == list("abc"[: len(sizes)])
    assert all(f"held {name}" in text for name in prepared.heldout for text in texts(tokenizer, prepared.heldout[name]))


def test_fewer_samples_keep_the_weights(prepare, write):
    prepared = mixed(prepare, write, (40, 40), (0.75, 0.25), max_train_samples=20)
    assert prepared.facts["by_source"] == [15, 5]


@pytest.mark.parametrize("sizes, limit, counts", [
    ((30, 10), 20, (15, 5)), ((10, 10, 10), 10, (4, 3, 3)), ((2, 98), 50, (1, 49)), ((1, 30), 3, (0, 3)),
    ((20, 10), 30, (20, 10)), ((20, 10), 99, (20, 10)), ((7, 7), 1, (1, 0)),
])  # fmt: skip
def test_fewer_samples_of_sources_without_weights_keep_their_sizes(prepare, write, tokenizer, sizes, limit, counts):
    prepared = mixed(prepare, write, sizes, (None,) * len(sizes), max_train_samples=limit)
    assert prepared.facts["by_source"] == list(counts)
    found = texts(tokenizer, prepared.train)
    for name, count in zip("abc", counts, strict=False):
        assert [text for text in found if f"user\n{name} " in text] == [
            t for i in range(count) for t in found if f"user\n{name} {i}?" in t
        ]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_sizes_hold_of_files_that_are_not_read_to_their_end(prepare, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 400)
    monkeypatch.setattr(rows, "CHUNK_ROWS", 10)
    sources = []
    for name, count in ("large", 3000), ("small", 1000):
        lines, file = [f"text {i:04}" for i in range(count)], tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": lines}), file)
        else:
            rows_ = [json.dumps({"text": line}) for line in lines] if kind == "jsonl" else ["text", *lines]
            file.write_text("\n".join(rows_) + "\n")
        sources.append({"train_file": str(file)})
    prepared = prepare(datasets=sources, max_train_samples=100)
    assert prepared.facts["by_source"] == [75, 25]
    if kind != "csv":
        assert len(np.load(prepared.train.folder / "counts.npy")) < 1000, "most of them are not tokenised"


def test_numbers_of_both_kinds_of_samples_are_met(prepare, write):
    file = write("a.jsonl", chats("a", 99))
    prepared = prepare(train_file=file, max_train_samples=20, max_eval_samples=3, validation_split=0.2)
    assert (len(prepared.train), len(prepared.heldout["a"])) == (20, 3)
    prepared = prepare(train_file=file, max_eval_samples=3, validation_split=0.2)
    assert len(prepared.train) == 96, "what is not evaluated is trained on"


def test_the_seed_chooses_the_samples(prepare, write):
    def chosen(seed):
        return [
            row["input_ids"].tolist()
            for row in mixed(prepare, write, (4, 40), (0.5, 0.5), training={"seed": seed}).train
        ]

    assert chosen(1) == chosen(1) != chosen(2)


@pytest.mark.parametrize("weights, said", [
    ((0.5, 0.6), "1.1"), ((0.2, 0.2), "0.4"), ((0.5, None), "1 of 2 sources have no weight"),
])  # fmt: skip
def test_weights_that_do_not_add_up(prepare, write, mistake, weights, said):
    message = mistake(mixed, prepare, write, (4, 4), weights)
    assert "data.datasets" in message and said in message


def test_sources_that_contradict_each_other(prepare, write, mistake):
    file = write("a.jsonl", chats("a", 4))
    assert "two sources are called 'a'" in mistake(prepare, datasets=[{"train_file": file}, {"train_file": file}])
    assert "both datasets and" in mistake(prepare, datasets=[{"train_file": file}], train_file=file)
    assert "datasets[1].train_file" in mistake(prepare, datasets=[{"train_file": file}, {"name": "b"}])


def test_a_mistake_names_the_file_of_its_source(prepare, write, mistake):
    bad = write("b.jsonl", [*chats("b", 2), {"hello": 1}])
    assert f"{bad}, line 3" in mistake(
        prepare, datasets=[{"train_file": write("a.jsonl", chats("a", 4))}, {"train_file": bad}]
    )


def test_a_share_is_held_out_of_each_source(prepare, write, tokenizer):
    sources = [{"train_file": write(f"{name}.jsonl", chats(name, size))} for name, size in (("a", 40), ("b", 3))]
    prepared = prepare(datasets=sources, validation_split=0.1)
    assert {name: len(held) for name, held in prepared.heldout.items()} == {"a": 4, "b": 1}
    held = {text for each in prepared.heldout.values() for text in texts(tokenizer, each)}
    assert len(held) == 5 and not held & set(texts(tokenizer, prepared.train))


@pytest.mark.parametrize("count, share", [(2, 0.99), (2, 0.01), (3, 0.8)])
def test_a_share_leaves_something_to_train_on(prepare, write, count, share):
    prepared = prepare(train_file=write("a.jsonl", chats("a", count)), validation_split=share)
    assert len(prepared.train) >= 1 and len(prepared.heldout["a"]) >= 1


@pytest.mark.parametrize("content", [chats("a", 1), [{"text": "word " * 99}], [{"text": ""}, {"text": "a"}]], ids=str)
def test_one_row_is_not_trained_on_and_held_out(prepare, write, mistake, content):
    message = mistake(prepare, train_file=write("a.jsonl", content), max_length=16)
    assert "a.jsonl" in message and "only one row" in message and "validation_file" in message.splitlines()[-1]


@pytest.mark.parametrize("chunk_bytes, share", [(1 << 20, 0.02), (1 << 20, 0.5), (700, 0.2)])
def test_what_a_long_text_is_split_into_lies_on_one_side(prepare, write, tokenizer, monkeypatch, chunk_bytes, share):
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    long = [{"text": f"{'abcdefghijkl'[i]} " * (0 if i % 5 == 4 else 60)} for i in range(12)]
    prepared = prepare(train_file=write("a.jsonl", long), validation_split=share, max_length=16)
    kept, held = (
        {letter for text in texts(tokenizer, part) for letter in text.split("<")[0].split()}
        for part in (prepared.train, prepared.heldout["a"])
    )
    assert not kept & held and kept | held == set("abcdfghikl")
    assert len(held) == max(1, round(10 * share)) and len(prepared.heldout["a"]) > len(held)


def test_numbers_of_samples(prepare, write, tokenizer):
    file, held = write("a.jsonl", chats("a", 30)), write("held.jsonl", chats("held", 9))
    prepared = prepare(train_file=file, validation_file=held, max_train_samples=5, max_eval_samples=3)
    assert (len(prepared.train), len(prepared.heldout["a"])) == (5, 3)
    assert (
        texts(tokenizer, prepared.train) == texts(tokenizer, prepare(train_file=file, validation_file=held).train)[:5]
    )
    prepared = prepare(train_file=file, max_train_samples=20, validation_split=0.2)
    assert (len(prepared.train), len(prepared.heldout["a"])) == (20, 5)
