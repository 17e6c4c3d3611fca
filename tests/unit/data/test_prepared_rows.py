"""Kinds of rows: chats, prompts with completions, texts, tools; what of each is supervised. Several sources: weights, numbers
of samples, and what is held out of each."""

import copy
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brigade.train.data import report, rows
from brigade.train.data.store import IGNORED
from testing.chats import chat
from testing.preparing import chats, figures, mixed, texts, words


def test_a_pair_of_texts_goes_through_the_chat_template(load, from_rows, tokenizer):
    """Else a model would be asked with a template, and would have learned without one."""
    prepared = from_rows({"prompt": "What is 1 + 1?", "completion": "It is 2."})
    (row,) = prepared.train
    assert words(tokenizer, row) == "It is 2.<|im_end|>"
    whole = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\nIt is 2.<|im_end|>\n"
    assert tokenizer.decode(row["input_ids"]) == whole
    assert "joined" not in figures(load, prepared)


@pytest.mark.parametrize("named", ["none", None])
def test_a_pair_of_texts_is_joined_where_there_is_no_template(load, from_rows, tokenizer, named):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None if named is None else bare.chat_template
    prepared = from_rows({"prompt": "What is 1 + 1?", "completion": " It is 2."}, tokenizer=bare, chat_template=named)
    (row,) = prepared.train
    assert words(tokenizer, row) == " It is 2.<|im_end|>"
    assert tokenizer.decode(row["input_ids"]) == "What is 1 + 1? It is 2.<|im_end|>"
    said = report.losses(prepared.facts)
    assert "1 pairs of prompt and completion joined as they are, for no chat template is set" in said


def test_a_text_is_supervised_whole_but_for_its_first_token(from_rows, tokenizer):
    (row,) = from_rows({"text": "Some words of a text."}).train
    assert row["labels"][0] == IGNORED and (row["labels"][1:] == row["input_ids"][1:]).all()
    assert tokenizer.decode(row["input_ids"]) == "Some words of a text.<|im_end|>"


def test_a_long_text_is_split_and_nothing_of_it_is_lost(from_rows, tokenizer):
    text = " ".join(f"word {i}" for i in range(100))
    prepared = from_rows({"text": text}, {"text": "short"}, max_length=16)
    *parts, short = prepared.train
    assert tokenizer.decode(np.concatenate([row["input_ids"] for row in parts])).startswith(text)
    assert all(len(row["input_ids"]) == 16 for row in parts[:-1])
    assert tokenizer.decode(short["input_ids"]).startswith("short")
    assert [prepared.facts[key] for key in ("cut", "split", "dropped")] == [0, 1, 0]


@pytest.mark.parametrize("processes", [1, 2])
def test_empty_texts_are_skipped_and_counted(load, prepare, write, tokenizer, monkeypatch, processes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 60)  # among them chunks of nothing else
    content = [{"text": text} for text in ("", "one", " \n\t", "two", *[""] * 20, "word " * 40, "\u00a0", "three")]
    data = {"train_file": write("a.jsonl", content), "max_length": 32, "dataset_num_proc": processes}
    data["validation_file"] = write("h.jsonl", [{"text": ""}, {"text": "held"}])
    prepared = prepare(**data)
    found = texts(tokenizer, prepared.train)
    assert [text.split("<")[0] for text in (*found[:2], found[-1])] == ["one", "two", "three"]
    assert "".join(found[2:-1]).startswith("word " * 39) and prepared.facts["samples"] == len(found)
    assert [prepared.facts[key] for key in ("empty", "split", "dropped")] == [23, 1, 0]
    assert len(prepared.heldout["a"]) == 1
    assert "23 empty texts skipped" in figures(load, prepared, data=data | {"dataset_name": None})


def test_empty_texts_alone_are_no_data(from_rows, mistake):
    assert "no training samples" in mistake(from_rows, *[{"text": ""}] * 3)


def test_a_bad_row_behind_empty_texts_is_named_by_its_line(from_rows, tmp_path, mistake):
    texts = ({"text": text} for text in ("", "a", " ", "word " * 99))
    assert f"{tmp_path / 'train.jsonl'}, line 4" in mistake(from_rows, *texts, max_length=16, truncation=False)


def test_an_end_that_the_tokenizer_writes_itself_is_learnt(from_rows, tokenizer):
    from tokenizers.processors import TemplateProcessing

    own = copy.deepcopy(tokenizer)
    end = own.eos_token
    ends = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, own.eos_token_id)])
    own.backend_tokenizer.post_processor = ends
    (row,) = from_rows({"prompt": "a", "completion": " b"}, tokenizer=own, chat_template="none").train
    assert words(tokenizer, row) == f" b{end}" and row["input_ids"].tolist().count(own.eos_token_id) == 1


@pytest.mark.parametrize("row, columns", [
    ({"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]}, {"messages": "conversations"}),
    ({"question": "a?", "answer": "b."}, {"prompt": "question", "completion": "answer"}),
    ({"content": "b."}, {"text": "content"}),
])  # fmt: skip
def test_columns_of_other_names(from_rows, write, tokenizer, mistake, row, columns):
    held = write("held2.jsonl", [row] * 2)
    prepared = from_rows(row, columns=columns, validation_file=held)
    assert "b." in words(tokenizer, prepared.train[0]) or "." in words(tokenizer, prepared.train[0])
    message = mistake(from_rows, row, validation_file=held)
    assert "none of the columns 'messages', 'prompt', 'text'" in message and repr(next(iter(row))) in message


PAST = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
ASKED = [*PAST, {"role": "user", "content": "c?"}]


@pytest.mark.parametrize("row, columns, whole, learned", [
    ({"messages": ASKED, "answer": "d."}, {"prompt": "messages", "completion": "answer"}, "assistant\nb.", "d."),
    ({"prompt": "d.", "completion": "e."}, {"text": "prompt"}, "d.", "."),
    ({"system": "c?", "answer": "d."}, {"prompt": "system", "completion": "answer"}, "<|im_start|>user\nc?", "d."),
    ({"history": "c?", "answer": "d."}, {"prompt": "history", "completion": "answer"}, "<|im_start|>user\nc?", "d."),
    ({"instruction": "c?", "input": "d."}, {"prompt": "instruction", "completion": "input"}, "user\nc?<|im_end|>", "d."),
    ({"messages": PAST, "question": "c?", "answer": "d."}, {"prompt": "question", "completion": "answer"}, "user\nc?", "d."),
    ({"messages": PAST, "body": "d."}, {"text": "body"}, "d.", "."),
    ({"messages": PAST, "prompt": "c?", "answer": "d."}, {"completion": "answer"}, "user\nc?", "d."),
], ids=str)  # fmt: skip
def test_a_column_is_read_as_what_the_recipe_names_it(from_rows, write, tokenizer, row, columns, whole, learned):
    """It is read as nothing else, and before what the recipe does not name."""
    held = write("held2.jsonl", [row] * 2)
    (sample,) = from_rows(row, columns=columns, chat_template="chatml", validation_file=held).train
    assert words(tokenizer, sample) == f"{learned}<|im_end|>"
    text = tokenizer.decode(sample["input_ids"])
    assert text.startswith(whole) or (whole in text and text.count("c?") == 1)


def test_a_completion_may_be_a_whole_chat_that_begins_with_its_prompt(from_rows, tokenizer, mistake):
    """As UltraFeedback's better answers are."""
    whole = [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d."}]
    row = {"prompt": "c?", "chosen": whole, "rejected": whole, "messages": PAST}
    (sample,) = from_rows(row, columns={"completion": "chosen", "ignore": "rejected"}, chat_template="chatml").train
    assert tokenizer.decode(sample["input_ids"]).count("c?") == 1 and words(tokenizer, sample) == "d.<|im_end|>"
    asked = {"prompt": whole[:1], "completion": whole[:1]}
    assert "has no assistant turn" in mistake(from_rows, asked, chat_template="chatml")


def test_truncation_off(from_rows, tmp_path, mistake):
    long = {"prompt": "a", "completion": " b" * 40}
    assert from_rows(long, max_length=16).facts["cut"] == 1
    for row in (long, {"text": " b" * 40}):
        message = mistake(from_rows, *chats("a", 2), row, max_length=20, truncation=False)
        assert f"{tmp_path / 'train.jsonl'}, line 3" in message and "max_length is 20" in message
        assert "truncation" in message
    assert from_rows(*chats("a", 2), max_length=20, truncation=False).facts["cut"] == 0


# ---- tools -------------------------------------------------------------------------------------------------------
def tool(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def with_tools(name, arguments, tools):
    roles = ("system", "user", "assistant", "tool", "assistant")
    turns = chat("Be brief.", "Do it.", "", "done", "It is done.", roles=roles)
    turns["messages"][2]["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"tools": tools} | turns


F = tool("f", x="integer")


def test_tool_calls_from_parquet_are_those_from_json(from_rows, prepare, write, tokenizer, tmp_path):
    content = [with_tools("f", {"x": 1}, [F]), with_tools("g", {"y": "a"}, [tool("g", y="string")])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / "a.parquet")
    held = write("held.jsonl", content[:1])
    lines = prepare(train_file=write("a.jsonl", content), validation_file=held, chat_template="qwen3")
    parquet = prepare(train_file=str(tmp_path / "a.parquet"), validation_file=held, chat_template="qwen3")
    assert texts(tokenizer, parquet.train) == texts(tokenizer, lines.train)
    whole = texts(tokenizer, lines.train)[0]
    assert "Be brief." in whole and '"x": 1' in whole and "null" not in whole and "done" in whole
    assert '"x": 1' in words(tokenizer, lines.train[0]) and "It is done." in words(tokenizer, lines.train[0])
    # OpenAI's own form: arguments, and here the tools too, as JSON in a text.
    as_text = [with_tools("f", json.dumps({"x": 1}), json.dumps([F]))]
    assert texts(tokenizer, from_rows(*as_text, chat_template="qwen3").train) == [whole]


def test_an_argument_that_is_null_stays(from_rows, tokenizer):
    (row,) = from_rows(with_tools("f", {"x": None}, [F]), chat_template="qwen3").train
    assert '"x": null' in words(tokenizer, row)


@pytest.mark.parametrize("template", ["chatml", "phi4"])
def test_tools_are_never_left_out_without_a_word(from_rows, tmp_path, mistake, template):
    """A stock ChatML template drops them, and the model would learn to answer as if it had called nothing."""
    whole = with_tools("f", {"x": 1}, [F])
    whole["messages"] = whole["messages"][1:3]  # user and call: a role `tool` is refused by its name
    tools, calls = {"tools": whole["tools"], **chats("a", 1)[0]}, {"messages": whole["messages"]}
    for part, fitting in (tools, "lfm2, qwen2.5, qwen3-2507"), (calls, "qwen2.5, qwen3-2507"):
        message = mistake(from_rows, *chats("a", 2), part, chat_template=template)
        assert f"{tmp_path / 'train.jsonl'}, line 3" in message and "tool" in message
        cure = f"name a chat_template that renders them ({fitting}), or remove them from the data"
        assert template != "chatml" or ("leaves them out" in message and cure in message)
    for nothing in ({"tools": []}, {"tools": None}):
        assert len(from_rows(chats("a", 1)[0] | nothing, chat_template=template).train) == 1


# ---- sources ---------------------------------------------------------------------------------------------------------
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


OF_SOURCES = {
    "train_file": "a.jsonl", "validation_file": "h.jsonl", "columns": {"prompt": "question"}, "dataset_name": "who/what",
    "dataset_config_name": "en", "dataset_revision": "main", "dataset_train_split": "train_sft", "dataset_test_split": "test_sft",
}  # fmt: skip


def test_sources_that_contradict_each_other(prepare, write, mistake):
    file = write("a.jsonl", chats("a", 4))
    assert "two sources are called 'a'" in mistake(prepare, datasets=[{"train_file": file}, {"train_file": file}])
    for key, value in OF_SOURCES.items():
        message = mistake(prepare, datasets=[{"train_file": file}], **{key: value})
        assert (
            f"data.{key}" in message and f"datasets is given, too, whose sources have a {key} of their own" in message
        )
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
    assert len(prepared.train) == 38
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
    both = prepare(train_file=file, validation_file=held).train
    assert texts(tokenizer, prepared.train) == texts(tokenizer, both)[:5]
    prepared = prepare(train_file=file, max_train_samples=20, validation_split=0.2)
    assert (len(prepared.train), len(prepared.heldout["a"])) == (20, 5)
