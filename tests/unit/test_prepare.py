"""The step that tokenises: cache, sources and weights, cutting and splitting, masks of each kind of row, the report."""

import copy
import io
import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brigade.data import build as building
from brigade.data import builtin, encode, packing, report, rows, tokenise
from brigade.data import prepare as preparing
from brigade.data.cache import cache_directory
from brigade.data.store import IGNORED, Samples
from brigade.errors import console
from brigade.recipe.batch import batch_arithmetic


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin.ensure(cache_directory()).tokenizer)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BRIGADE_CACHE", str(folder))
    return folder


@pytest.fixture
def write(tmp_path):
    def call(name, content):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(tmp_path / name)

    return call


@pytest.fixture
def prepare(load, tokenizer):
    def call(training=None, tokenizer=tokenizer, **data):
        return preparing.prepare(load(data={"dataset_name": None} | data, training=training or {}), tokenizer)

    return call


@pytest.fixture
def from_rows(prepare, write):
    """The samples of these rows, in order."""

    def call(*content, **data):
        held = {"validation_file": write("held.jsonl", [{"text": "held out"}])}
        return prepare(train_file=write("train.jsonl", content), **held | data)

    return call


def chats(name, count):
    return [
        {"messages": [{"role": "user", "content": f"{name} {i}?"}, {"role": "assistant", "content": f"{name} {i}."}]}
        for i in range(count)
    ]


def words(tokenizer, row):
    """What is supervised of a sample, as text."""
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def texts(tokenizer, samples):
    return [tokenizer.decode(row["input_ids"]) for row in samples]


# ---- the cache ---------------------------------------------------------------------------------------------------
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
    assert len(pids) == 1, "the parent loaded a tokenizer of its own"
    assert len(parallel) == len(serial)
    for ours, theirs in zip(parallel, serial, strict=True):
        assert ours.after == theirs.after and ours.size == theirs.size
        for key in ("tokens", "supervised", "samples"):
            assert (getattr(ours, key) == getattr(theirs, key)).all()
    # And the files of the whole step.
    contents, said = [], []
    for processes in (1, 2):
        monkeypatch.setattr(console, "LINES", 3600 * (2 - processes))  # before the time is up all is silent
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


# ---- sources, weights, numbers -----------------------------------------------------------------------------------
def mixed(prepare, write, sizes, weights, **data):
    sources = [
        {
            "train_file": write(f"{name}.jsonl", chats(name, size)),
            "name": name,
            "weight": weight,
            "validation_file": write(f"held-{name}.jsonl", chats(f"held {name}", 2)),
        }
        for name, size, weight in zip("abc", sizes, weights, strict=False)
    ]
    return prepare(datasets=sources, **data)


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
    message = mistake(prepare, datasets=[{"train_file": write("a.jsonl", chats("a", 4))}, {"train_file": bad}])
    assert f"{bad}, line 3" in message


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
    assert "a.jsonl" in message and "one row alone" in message and "validation_file" in message.splitlines()[-1]


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


# ---- kinds of rows -----------------------------------------------------------------------------------------------
def test_a_completion_is_supervised_and_its_prompt_is_not(from_rows, tokenizer):
    (row,) = from_rows({"prompt": "What is 1 + 1?", "completion": " It is 2."}).train
    assert words(tokenizer, row) == " It is 2.<|im_end|>"
    assert tokenizer.decode(row["input_ids"]) == "What is 1 + 1? It is 2.<|im_end|>"


def test_prompt_and_completion_of_messages(from_rows, tokenizer):
    history = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "b?"},
    ]
    (row,) = from_rows({"prompt": history, "completion": [{"role": "assistant", "content": "second"}]}).train
    assert "first" in tokenizer.decode(row["input_ids"])
    assert words(tokenizer, row) == "second<|im_end|>", "an answer in the prompt is no part of the completion"


def test_a_text_is_supervised_whole_but_for_its_first_token(from_rows, tokenizer):
    (row,) = from_rows({"text": "Some words of a text."}).train
    assert row["labels"][0] == IGNORED and (row["labels"][1:] == row["input_ids"][1:]).all()
    assert tokenizer.decode(row["input_ids"]) == "Some words of a text.<|im_end|>"


def test_a_long_text_is_split_and_nothing_of_it_is_lost(from_rows, tokenizer):
    text = " ".join(f"word {i}" for i in range(100))
    prepared = from_rows({"text": text}, {"text": "short"}, max_length=16)
    *parts, short = prepared.train
    assert tokenizer.decode(np.concatenate([row["input_ids"] for row in parts])).startswith(text)
    assert all(len(row["input_ids"]) == 16 for row in parts[:-1]) and tokenizer.decode(short["input_ids"]).startswith(
        "short"
    )
    assert [prepared.facts[key] for key in ("cut", "split", "dropped")] == [0, 1, 0]


@pytest.mark.parametrize("processes", [1, 2])
def test_empty_texts_are_skipped_and_counted(load, prepare, write, tokenizer, monkeypatch, processes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 60)  # among them chunks of nothing else
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    content = [{"text": text} for text in ("", "one", " \n\t", "two", *[""] * 20, "word " * 40, "\u00a0", "three")]
    data = {
        "train_file": write("a.jsonl", content),
        "validation_file": write("h.jsonl", [{"text": ""}, {"text": "held"}]),
        "max_length": 32,
        "dataset_num_proc": processes,
    }
    prepared = prepare(**data)
    found = texts(tokenizer, prepared.train)
    assert [text.split("<")[0] for text in (*found[:2], found[-1])] == ["one", "two", "three"]
    assert "".join(found[2:-1]).startswith("word " * 39) and prepared.facts["samples"] == len(found)
    assert [prepared.facts[key] for key in ("empty", "split", "dropped")] == [23, 1, 0]
    assert len(prepared.heldout["a"]) == 1
    assert "23 empty texts skipped" in figures(load, prepared, data=data | {"dataset_name": None})


def test_empty_texts_alone_are_no_data(prepare, write, mistake):
    file, held = write("a.jsonl", [{"text": ""}] * 3), write("h.jsonl", [{"text": "held"}])
    assert "no training samples" in mistake(prepare, train_file=file, validation_file=held)


def test_a_bad_row_behind_empty_texts_is_named_by_its_line(prepare, write, mistake):
    long = {"text": "word " * 99}
    file = write("a.jsonl", [{"text": ""}, {"text": "a"}, {"text": " "}, long])
    assert f"{file}, line 4" in mistake(prepare, train_file=file, max_length=16, truncation=False)


def test_an_end_that_the_tokenizer_writes_itself_is_learnt(from_rows, tokenizer):
    from tokenizers.processors import TemplateProcessing

    own = copy.deepcopy(tokenizer)
    end = own.eos_token
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, own.eos_token_id)]
    )
    (row,) = from_rows({"prompt": "a", "completion": " b"}, tokenizer=own).train
    assert words(tokenizer, row) == f" b{end}" and row["input_ids"].tolist().count(own.eos_token_id) == 1


@pytest.mark.parametrize("row, columns", [
    ({"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]}, {"messages": "conversations"}),
    ({"question": "a?", "answer": "b."}, {"prompt": "question", "completion": "answer"}),
    ({"content": "b."}, {"text": "content"}),
])  # fmt: skip
def test_columns_of_other_names(from_rows, prepare, write, tokenizer, mistake, row, columns):
    held = write("held2.jsonl", [row] * 2)
    prepared = from_rows(row, columns=columns, validation_file=held)
    assert "b." in words(tokenizer, prepared.train[0]) or "." in words(tokenizer, prepared.train[0])
    message = mistake(prepare, train_file=write("plain.jsonl", [row]), validation_file=held)
    assert "none of the columns 'messages', 'prompt', 'text'" in message and repr(next(iter(row))) in message


@pytest.mark.parametrize("row, said", [
    ({"prompt": "a"}, "'completion'"), ({"prompt": "a", "completion": ""}, "empty"),
    ({"text": 3}, "the text is 3"), ({"prompt": "a", "completion": ["b"]}, "list"), ({}, "nothing"),
    ({"messages": [{"role": "user", "content": "a"}]}, "without an assistant turn"),
    ({"prompt": chats("a", 1)[0]["messages"], "completion": [{"role": "user", "content": "b"}]}, "no assistant turn"),
    ({"messages": [{"role": "user", "content": "a"}] * 2}, "do not alternate"),
    ({"messages": [{"role": "assistant", "content": "a"}] * 2}, "do not alternate"),
    ({"messages": [*chats("a", 1)[0]["messages"], {"role": "system", "content": "s"}]}, "only be the first"),
    ({"text": "\ud800"}, "train.jsonl"),
], ids=str)  # fmt: skip
def test_rows_that_hold_nothing_to_learn(from_rows, tmp_path, mistake, row, said):
    message = mistake(from_rows, *chats("a", 2), row)
    assert f"{tmp_path / 'train.jsonl'}, line 3" in message and said in message


def test_truncation_off(from_rows, tmp_path, mistake):
    long = {"prompt": "a", "completion": " b" * 40}
    assert from_rows(long, max_length=16).facts["cut"] == 1
    for row in (long, {"text": " b" * 40}):
        message = mistake(from_rows, *chats("a", 2), row, max_length=20, truncation=False)
        assert (
            f"{tmp_path / 'train.jsonl'}, line 3" in message
            and "max_length is 20" in message
            and "truncation" in message
        )
    assert from_rows(*chats("a", 2), max_length=20, truncation=False).facts["cut"] == 0


# ---- tools -------------------------------------------------------------------------------------------------------
def tool(name, **properties):
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}},
        },
    }


def with_tools(name, arguments, tools):
    return {
        "tools": tools,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Do it."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
            },
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "It is done."},
        ],
    }


def test_tool_calls_from_parquet_are_those_from_json(from_rows, prepare, write, tokenizer, tmp_path):
    content = [
        with_tools("f", {"x": 1}, [tool("f", x="integer")]),
        with_tools("g", {"y": "a"}, [tool("g", y="string")]),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / "a.parquet")
    held = write("held.jsonl", content[:1])
    lines = prepare(train_file=write("a.jsonl", content), validation_file=held, chat_template="qwen3")
    parquet = prepare(train_file=str(tmp_path / "a.parquet"), validation_file=held, chat_template="qwen3")
    assert texts(tokenizer, parquet.train) == texts(tokenizer, lines.train)
    whole = texts(tokenizer, lines.train)[0]
    assert "Be brief." in whole and '"x": 1' in whole and "null" not in whole and "done" in whole
    assert '"x": 1' in words(tokenizer, lines.train[0]) and "It is done." in words(tokenizer, lines.train[0])
    # OpenAI's own form: arguments, and here the tools too, as JSON in a text.
    as_text = [with_tools("f", json.dumps({"x": 1}), json.dumps([tool("f", x="integer")]))]
    assert texts(tokenizer, from_rows(*as_text, chat_template="qwen3").train) == [whole]


def test_an_argument_that_is_null_stays(from_rows, tokenizer):
    (row,) = from_rows(with_tools("f", {"x": None}, [tool("f", x="integer")]), chat_template="qwen3").train
    assert '"x": null' in words(tokenizer, row)


@pytest.mark.parametrize("template", ["chatml", "gemma3", "phi4"])
def test_tools_are_never_left_out_without_a_word(from_rows, tmp_path, mistake, template):
    """A stock ChatML template drops them, and the model would learn to answer as if it had called nothing."""
    whole = with_tools("f", {"x": 1}, [tool("f", x="integer")])
    whole["messages"] = whole["messages"][1:3]  # user and call: a role `tool` is refused by its name
    for part in ({"tools": whole["tools"], **chats("a", 1)[0]}, {"messages": whole["messages"]}):
        message = mistake(from_rows, *chats("a", 2), part, chat_template=template)
        assert f"{tmp_path / 'train.jsonl'}, line 3" in message and "tool" in message
        assert template != "chatml" or ("leaves them out" in message and "chat_template" in message.splitlines()[-1])
    for nothing in ({"tools": []}, {"tools": None}):
        assert len(from_rows(chats("a", 1)[0] | nothing, chat_template=template).train) == 1


def test_a_template_that_renders_tools_renders_them(from_rows, tokenizer, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% if tools %}{{ tools | length }} tools {% endif %}{% for m in messages %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (row,) = from_rows({"tools": [tool("f"), tool("g")], **chats("a", 1)[0]}, chat_template=str(own)).train
    assert tokenizer.decode(row["input_ids"]).startswith("2 tools")


# ---- packing -----------------------------------------------------------------------------------------------------
def test_packed_rows_are_the_same_samples(prepare, write, tokenizer):
    data = {"train_file": write("a.jsonl", chats("a", 50)), "validation_file": write("h.jsonl", chats("h", 3))}
    single, packed = prepare(**data, max_length=64), prepare(**data, max_length=64, packing=True)
    assert isinstance(packed.train, Samples) and len(packed.train) == packed.facts["sequences"] < 50
    parts = []
    for row in packed.train:
        assert row["lengths"].sum() == len(row["input_ids"]) == len(row["labels"]) <= 64
        ends = row["lengths"].cumsum()[:-1]
        parts += zip(np.split(row["input_ids"], ends), np.split(row["labels"], ends), strict=True)
    assert all(labels[0] == IGNORED for _, labels in parts), "a sample's first token is not the last one's next"
    ours = sorted((ids.tolist(), labels.tolist()) for ids, labels in parts)
    assert ours == sorted((row["input_ids"].tolist(), row["labels"].tolist()) for row in single.train)
    assert all(len(row["lengths"]) == 1 for row in packed.heldout["a"])
    assert packed.train.supervised().sum() == single.train.supervised().sum() == packed.facts["supervised"]
    assert packed.train.lengths().sum() == packed.facts["tokens"]
    lengths = single.train.lengths()
    assert len(packed.train) == len(packing.best_fit(lengths, 64))


# ---- what is printed ---------------------------------------------------------------------------------------------
def figures(load, prepared, **sections):
    settings = load(**sections)
    training = settings.recipe.training
    return report.figures(prepared, settings.recipe.data, training, batch_arithmetic(training, 1, ""))


def test_figures(load, prepare, write):
    data = {
        "train_file": write("a.jsonl", [*chats("a", 50), {"prompt": "why " * 90, "completion": "b"}]),
        "validation_file": write("h.jsonl", chats("h", 3)),
        "max_length": 64,
    }
    prepared = prepare(**data)
    said = figures(load, prepared, data=data | {"dataset_name": None})
    share = prepared.facts["supervised"] / prepared.facts["tokens"]
    assert f"50 training and 3 held-out samples, {prepared.facts['tokens']:,} tokens, {share:.0%} supervised" in said
    assert (
        "0% padding" in said
        and "1 longer than max_length cut" in said
        and "1 without a supervised token dropped" in said
    )
    assert "packed" not in said
    packed = prepare(**data, packing=True)
    said = figures(load, packed, data=data | {"dataset_name": None, "packing": True})
    full = packed.facts["tokens"] / packed.facts["sequences"] / 64
    assert f"packed into {packed.facts['sequences']} sequences, {full:.1%} full" in said


def test_what_is_too_long_is_told_by_what_became_of_it(load, prepare, write):
    """Texts lose nothing; chats, and completions, lose their end."""
    long = "word " * 100
    texts_, held = [{"text": long}] * 2, {"validation_file": write("h.jsonl", chats("h", 3)), "max_length": 64}
    turns = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": long}]}] * 3

    def said(*content, **changes):
        data = held | {"train_file": write("a.jsonl", [*chats("a", 4), *content])} | changes
        return figures(load, prepare(**data), data=data | {"dataset_name": None})

    assert "longer" not in said()
    assert "2 longer texts split into several samples" in (found := said(*texts_)) and "cut" not in found
    assert "3 longer than max_length cut" in (found := said(*turns)) and "split" not in found
    assert "3 longer than max_length cut, 2 longer texts split into several samples" in said(*texts_, *turns)
    assert "1 longer than max_length cut" in said({"prompt": "a", "completion": long})


def test_the_shares_are_those_of_the_samples_that_are_trained_on(load, prepare, write):
    """Held-out samples, and those beyond max_train_samples, have no part in them."""
    pairs = [{"prompt": "a " * 30, "completion": "b"}, {"prompt": "a", "completion": " b" * 60}]
    data = {
        "train_file": write("a.jsonl", pairs),
        "validation_file": write("h.jsonl", pairs[1:] * 9),
        "max_train_samples": 1,
    }
    prepared = prepare(**data)
    (row,) = prepared.train
    supervised = int((row["labels"] != IGNORED).sum())
    assert supervised < 5 and (prepared.facts["supervised"], prepared.facts["tokens"]) == (
        supervised,
        len(row["labels"]),
    )
    said = figures(load, prepared, data=data | {"dataset_name": None})
    assert f"{len(row['labels'])} tokens, {supervised / len(row['labels']):.0%} supervised" in said
    padded = figures(load, prepare(**data), data=data | {"dataset_name": None}, training={"padding_free": False})
    assert "0% padding" in said and "0% padding" in padded, "one length needs none"


LONG = {"prompt": "a", "completion": " b" * 99}  # is cut
LOST = {"prompt": "a " * 99, "completion": "b"}  # is cut, and then dropped
TEXT = {"text": "a b " * 99}  # is split


@pytest.mark.parametrize("before, behind, options, counts", [
    ([LONG, LOST, TEXT], [], {}, (2, 1, 1)),
    ([LONG, LOST, TEXT], [LONG, LOST, TEXT], {}, (4, 2, 2)),
    ([LONG], [LONG, LOST, TEXT], {"max_train_samples": 9}, (1, 0, 0)),
    ([LOST], [LOST, LONG], {"max_train_samples": 8}, (1, 0, 1)),
    ([LOST], [LOST, LONG], {"max_train_samples": 9}, (3, 0, 2)),
    ([], [LONG, LOST, TEXT], {"max_train_samples": 8}, (0, 0, 0)),
], ids=["few", "many", "one beyond", "two beyond", "none beyond", "all beyond"])  # fmt: skip
def test_counts_are_those_of_the_rows_that_are_trained_on(prepare, write, before, behind, options, counts):
    """And of rows that were dropped among them; of none that are held out or beyond max_train_samples."""
    file = write("a.jsonl", [*before, *chats("a", 8), *behind])
    prepared = prepare(train_file=file, validation_file=write("h.jsonl", [LONG, LOST, TEXT]), max_length=32, **options)
    assert tuple(prepared.facts[key] for key in ("cut", "split", "dropped")) == counts


def test_of_a_held_out_share_and_of_what_weights_leave_out_nothing_is_counted(prepare, write):
    prepared = prepare(train_file=write("a.jsonl", [LONG] * 20), validation_split=0.25, max_length=32)
    assert prepared.facts["cut"] == len(prepared.train) == 15
    few, many = write("few.jsonl", chats("a", 10)), write("many.jsonl", [LONG] * 30 + [LOST] * 5)
    held = write("h.jsonl", chats("h", 1))
    sources = [{"train_file": file, "validation_file": held, "weight": 0.5} for file in (few, many)]
    prepared = prepare(datasets=sources, max_length=32)
    assert prepared.facts["by_source"] == [10, 10]
    assert prepared.facts["cut"] == 10 and prepared.facts["dropped"] == 0


def test_the_share_of_padding_is_that_of_the_batches(load, prepare, write):
    rows_ = [{"text": "word " * (2 + i % 7)} for i in range(64)]
    data = {"train_file": write("a.jsonl", rows_), "validation_file": write("h.jsonl", rows_[:1])}
    prepared = prepare(**data)
    settings = load(data=data | {"dataset_name": None}, training={"padding_free": False, "seed": 5})
    training = settings.recipe.training
    batch = batch_arithmetic(training, 1, "")
    from brigade.data.collate import Collate, WithFiller
    from brigade.data.sampling import GlobalBatches

    collate = Collate(0, padding_free=False, packed=False, cumulative=False)
    samples = WithFiller(prepared.train, 0)
    found = [
        collate(samples.__getitems__(each))["about"]
        for each in GlobalBatches(len(prepared.train), batch.micro, batch.accumulation, 0, 1, 5)
    ]
    slots = sum(about.slots for about in found)
    assert report.padding(prepared.train, training, batch) == pytest.approx(1 - prepared.facts["tokens"] / slots)


def test_sources_are_told_with_their_numbers(load, prepare, write):
    said = figures(load, mixed(prepare, write, (10, 20), (0.5, 0.5)))
    assert "10 a + 10 b" in said and "4 held-out" in said


def test_one_sample_with_its_supervised_part_marked(prepare, write, tokenizer, monkeypatch):
    from rich.console import Console

    prepared = prepare(train_file=write("a.jsonl", chats("Grüße", 4)), validation_file=write("h.jsonl", chats("h", 1)))
    plain = report.sample(prepared, tokenizer).plain
    assert plain == "<|im_start|>user\nGrüße 0?<|im_end|>\n<|im_start|>assistant\n[[Grüße 0.<|im_end|>]]\n"
    monkeypatch.setattr("sys.stdout", Terminal())
    coloured = report.sample(prepared, tokenizer)
    assert coloured.plain == plain.replace("[[", "").replace("]]", "")
    marked = [coloured.plain[span.start : span.end] for span in coloured.spans if "green" in str(span.style)]
    assert marked == ["Grüße 0.<|im_end|>"]
    Console(file=(out := io.StringIO()), force_terminal=True, color_system="standard", width=100).print(coloured)
    assert "\x1b[4;32mGrüße 0.<|im_end|>" in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_every_turn_of_the_assistant_is_marked(prepare, write, tokenizer):
    turns = chats("a", 1)[0]["messages"] + chats("b", 1)[0]["messages"]
    files = {"train_file": write("a.jsonl", [{"messages": turns}]), "validation_file": write("h.jsonl", chats("h", 1))}
    shown = report.sample(prepare(**files), tokenizer).plain
    assert shown.count("[[") == 2 and "[[a 0.<|im_end|>]]" in shown and "[[b 0.<|im_end|>]]" in shown
    text = write("t.jsonl", [{"text": "All of it."}])
    shown = report.sample(prepare(**files | {"train_file": text}), tokenizer).plain
    assert shown.endswith("[[ of it.<|im_end|>]]"), "all but the first token, which nothing predicts"


def test_of_a_stream_a_held_out_sample_is_shown(load, prepare, write, tokenizer):
    data = {
        "train_file": write("a.jsonl", chats("a", 9)),
        "validation_file": write("h.jsonl", chats("held", 2)),
        "streaming": True,
    }
    prepared = prepare(**data, training={"max_steps": 3})
    assert "held 0?" in report.sample(prepared, tokenizer).plain
    said = figures(load, prepared, data=data | {"dataset_name": None, "packing": True}, training={"max_steps": 3})
    assert said == "streamed, 2 held-out samples, packed"


def test_a_packed_row_shows_its_first_sample_and_a_long_one_its_begin(prepare, write, tokenizer):
    data = {"validation_file": write("h.jsonl", chats("h", 1)), "packing": True}
    shown = report.sample(prepare(train_file=write("a.jsonl", chats("a", 4)), **data), tokenizer).plain
    assert shown.count("<|im_start|>user") == 1
    long = report.sample(prepare(train_file=write("b.jsonl", [{"text": "word " * 999}]), **data), tokenizer)
    assert len(long) <= report.LONGEST


def test_no_line_of_the_sample_is_folded(prepare, write, tokenizer, capsys):
    files = {
        "train_file": write("a.jsonl", [{"text": "a long line " * 40}]),
        "validation_file": write("h.jsonl", chats("h", 1)),
    }
    report.show_sample(prepare(**files), tokenizer)
    assert "a long line " * 30 in capsys.readouterr().out
