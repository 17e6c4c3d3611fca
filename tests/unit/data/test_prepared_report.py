"""Packed rows, and what preparation prints: figures, shares, a sample with its supervised part marked."""

import io
import pickle
import re

import numpy as np
import pytest
from rich.console import Console

from brigade.train.data import packing, report
from brigade.train.data import prepare as preparing
from brigade.train.data.collate import Collate, Layout, WithFiller
from brigade.train.data.sampling import GlobalBatches
from brigade.train.data.store import IGNORED, Samples
from brigade.train.recipe.batch import batch_arithmetic
from testing.preparing import chats, figures, mixed


@pytest.fixture
def files(write):
    """files(train, held, ...): a recipe's data of these rows."""

    def call(train, held, **data):
        return {"train_file": write("a.jsonl", train), "validation_file": write("h.jsonl", held)} | data

    return call


def test_packed_rows_are_the_same_samples(prepare, files):
    data = files(chats("a", 50), chats("h", 3))
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
def test_figures(load, prepare, files):
    data = files([*chats("a", 50), {"prompt": "why " * 90, "completion": "b"}], chats("h", 3), max_length=64)
    prepared = prepare(**data)
    said = figures(load, prepared, data=data | {"dataset_name": None})
    share = prepared.facts["supervised"] / prepared.facts["tokens"]
    assert f"50 training and 3 held-out samples, {prepared.facts['tokens']:,} tokens, {share:.0%} supervised" in said
    assert "0% padding" in said and "packed" not in said
    assert "1 longer than max_length cut" in said and "1 without a supervised token dropped" in said
    packed = prepare(**data, packing=True)
    said = figures(load, packed, data=data | {"dataset_name": None, "packing": True})
    full = packed.facts["tokens"] / packed.facts["sequences"] / 64
    assert f"packed into {packed.facts['sequences']} sequences, {full:.1%} full" in said


def test_many_lost_samples_and_few_held_out_have_lines_of_their_own(prepare, write):
    lost = [{"prompt": "why " * 90, "completion": "b"}] * 5
    held = {"validation_file": write("h.jsonl", chats("h", 19)), "max_length": 64}
    said = report.lines(prepare(train_file=write("a.jsonl", [*chats("a", 45), *lost]), **held))
    assert said["lost"].startswith("10% of the samples (5) are dropped")
    enough = int(re.search(r"max_length (\d+) keeps 95% of them", said["lost"])[1])
    kept = [prepare(train_file=write("a.jsonl", [*chats("a", 45), *lost]), **held | {"max_length": length})
            for length in (enough - 1, enough)]  # fmt: skip
    assert [each.facts["dropped"] for each in kept] == [5, 0]
    empty = [{"text": ""}] * 9  # which no max_length would keep, and which are no samples
    answer = {"role": "assistant", "content": "b", "weight": 0}
    mute = [{"messages": [{"role": "user", "content": "a " * 90}, answer]}] * 5
    said = report.lines(prepare(train_file=write("c.jsonl", [*chats("a", 45), *mute, *empty]), **held))
    assert said["lost"].endswith("; no max_length keeps 95% of them")
    assert said["held out"].startswith("19 samples only")
    held["validation_file"] = write("i.jsonl", chats("h", 20))
    said = report.lines(prepare(train_file=write("b.jsonl", [*chats("a", 95), *lost]), **held))
    assert not said.keys() & {"lost", "held out"}


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


def test_the_shares_are_those_of_the_samples_that_are_trained_on(load, prepare, files):
    """Held-out samples, and those beyond max_train_samples, have no part in them."""
    pairs = [{"prompt": "a " * 30, "completion": "b"}, {"prompt": "a", "completion": " b" * 60}]
    data = files(pairs, pairs[1:] * 9, max_train_samples=1)
    prepared = prepare(**data)
    (row,) = prepared.train
    supervised = int((row["labels"] != IGNORED).sum())
    tokens = len(row["labels"])
    assert supervised < 5 and (prepared.facts["supervised"], prepared.facts["tokens"]) == (supervised, tokens)
    said = figures(load, prepared, data=data | {"dataset_name": None})
    assert f"{tokens} tokens, {supervised / tokens:.0%} supervised" in said
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
def test_counts_are_those_of_the_rows_that_are_trained_on(prepare, files, before, behind, options, counts):
    """And of rows that were dropped among them; of none that are held out or beyond max_train_samples."""
    prepared = prepare(**files([*before, *chats("a", 8), *behind], [LONG, LOST, TEXT], max_length=32, **options))
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


def test_the_share_of_padding_is_that_of_the_batches(load, prepare, files):
    rows_ = [{"text": "word " * (2 + i % 7)} for i in range(64)]
    data = files(rows_, rows_[:1])
    prepared = prepare(**data)
    training = load(data=data | {"dataset_name": None}, training={"padding_free": False, "seed": 5}).recipe.training
    batch = batch_arithmetic(training, 1, "")
    collate = Collate(0, Layout(padding_free=False, packed=False, cumulative=False))
    samples = WithFiller(prepared.train, 0)
    batches = GlobalBatches(len(prepared.train), batch.micro, batch.accumulation, 0, 1, 5)
    slots = sum(collate(samples.__getitems__(each))["about"].slots for each in batches)
    assert report.padding(prepared.train, training, batch) == pytest.approx(1 - prepared.facts["tokens"] / slots)


def test_sources_are_told_with_their_numbers(load, prepare, write):
    said = figures(load, mixed(prepare, write, (10, 20), (0.5, 0.5)))
    assert "10 a + 10 b" in said and "4 held-out" in said


def test_one_sample_with_its_supervised_part_marked(from_rows, tokenizer):
    prepared = from_rows(*chats("Grüße", 4))
    plain = report.sample(prepared, tokenizer).plain
    assert plain == "<|im_start|>user\nGrüße 0?<|im_end|>\n<|im_start|>assistant\n[[Grüße 0.<|im_end|>]]\n"
    coloured = report.sample(prepared, tokenizer, brackets=False)
    assert coloured.plain == plain.replace("[[", "").replace("]]", "")
    marked = [coloured.plain[span.start : span.end] for span in coloured.spans if "green" in str(span.style)]
    assert marked == ["Grüße 0.<|im_end|>"]
    Console(file=(out := io.StringIO()), force_terminal=True, color_system="standard", width=100).print(coloured)
    assert "\x1b[4;32mGrüße 0.<|im_end|>" in out.getvalue()


def test_every_turn_of_the_assistant_is_marked(from_rows, tokenizer):
    turns = chats("a", 1)[0]["messages"] + chats("b", 1)[0]["messages"]
    shown = report.sample(from_rows({"messages": turns}), tokenizer).plain
    assert shown.count("[[") == 2 and "[[a 0.<|im_end|>]]" in shown and "[[b 0.<|im_end|>]]" in shown
    shown = report.sample(from_rows({"text": "All of it."}), tokenizer).plain
    assert shown.endswith("[[ of it.<|im_end|>]]"), "all but the first token, which nothing predicts"


def test_of_a_stream_a_held_out_sample_is_shown(load, prepare, files, tokenizer):
    data = files(chats("a", 9), chats("held", 2), streaming=True)
    prepared = prepare(**data, training={"max_steps": 3})
    assert "held 0?" in report.sample(prepared, tokenizer).plain
    said = figures(load, prepared, data=data | {"dataset_name": None, "packing": True}, training={"max_steps": 3})
    assert said == "streamed, 2 held-out samples, packed"


def test_a_packed_row_shows_its_first_sample_and_a_long_one_its_begin(from_rows, tokenizer):
    shown = report.sample(from_rows(*chats("a", 4), packing=True), tokenizer).plain
    assert shown.count("<|im_start|>user") == 1
    long = report.sample(from_rows({"text": "word " * 999}, packing=True), tokenizer)
    assert len(long) <= report.LONGEST


def test_of_a_long_sample_the_begin_and_the_end_of_what_is_learned_are_shown(from_rows, tokenizer):
    """Definitions of tools alone are longer than what is shown."""
    parameters = {"type": "object", "properties": {f"x{n}": {"type": "string"} for n in range(40)}}
    tool = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": parameters}}
    question = {"role": "user", "content": "Turn it off. " + "Please. " * 30}
    answer = {"role": "assistant", "content": "I begin. " + "And I go on. " * 99 + "I end."}
    rows = {"messages": [question, answer], "tools": [tool]}
    shown = report.sample(from_rows(rows, rows, chat_template="qwen2.5"), tokenizer).plain
    begin, first, last = shown.split(" ... (")
    assert begin.startswith("<|im_start|>system") and len(begin) == 150 and "[[" not in begin
    assert "characters left out) ... " in first and "Please. <|im_end|>" in first
    assert "[[I begin. And I go on. " in first
    assert first.endswith("]]") and last.endswith("And I go on. I end.<|im_end|>]]\n")
    lost = int(last.partition(" characters left out, ")[0].replace(",", ""))
    learned = len("I begin. I end.<|im_end|>") + 99 * len("And I go on. ")
    kept = sum(len(part.partition("]]")[0]) for part in shown.split("[[")[1:])
    assert f"{lost:,} of them learned" in last and kept + lost == learned and len(shown) < report.LONGEST + 100


def test_no_line_of_the_sample_is_folded(from_rows, tokenizer, capsys):
    report.show_sample(from_rows({"text": "a long line " * 40}), tokenizer)
    assert "a long line " * 30 in capsys.readouterr().out


def test_of_a_large_share_that_nobody_asked_for_a_part_is_evaluated_and_this_is_said(load, prepare, write, monkeypatch):
    monkeypatch.setattr(preparing, "MOST_EVALUATED", 5)
    file = write("a.jsonl", chats("a", 1000))
    data = {"train_file": file, "dataset_name": None}
    said = prepare(**data)
    (few,), (every,) = said.heldout.values(), prepare(**data, max_eval_samples=None).heldout.values()
    assert (len(few), len(every), len(said.train)) == (5, 20, 980)
    assert [row["input_ids"].tolist() for row in few] == [every[n]["input_ids"].tolist() for n in (0, 4, 9, 14, 19)]
    assert len(few.lengths()) == len(few.supervised()) == 5 == len(pickle.loads(pickle.dumps(few)))
    words = figures(load, said, data=data)
    spread = "980 training and 5 held-out samples, spread evenly over the 20 that are held out (max_eval_samples: null"
    assert spread in words
    assert "spread" not in figures(load, prepare(**data, max_eval_samples=None), data=data)


@pytest.mark.parametrize(
    "more", [{"max_eval_samples": 12}, {"validation_split": 0.012}, {"validation_file": True}], ids=str
)
def test_who_says_how_many_or_which_are_held_out_has_all_of_them_evaluated(prepare, write, monkeypatch, more):
    monkeypatch.setattr(preparing, "MOST_EVALUATED", 5)
    if "validation_file" in more:
        more = {"validation_file": write("held.jsonl", chats("held", 12))}
    (held,) = prepare(train_file=write("a.jsonl", chats("a", 1000)), **more).heldout.values()
    assert len(held) == held.stored == 12
