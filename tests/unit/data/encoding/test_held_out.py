"""How many samples are trained on and held out, and which are cut or dropped, whatever source they are from."""

import json
import shutil

import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data import report, sources
from testing.chats import CHATS, HELD, chat, only, same, words


def test_cut_and_dropped_are_counted(tokenizer, prepare):
    long_question = chat("why? " * 100, "so.")
    long_answer = chat("a", "b c d e f " * 100)
    data = prepare([*CHATS, long_question, long_answer], CHATS, max_length=64)
    assert (data.cut, data.dropped) == (2, 1)  # the long question is both: no supervised token is left of it
    assert len(data.train) == len(CHATS) + 1
    assert max(len(row["input_ids"]) for row in data.train) == 64
    assert words(tokenizer, data.train)[-1].startswith("b c d") and "<|im_end|>" not in words(tokenizer, data.train)[-1]


def test_a_sample_of_just_max_length_is_not_cut(prepare):
    whole = prepare([CHATS[0]], CHATS)
    n = len(whole.train[0]["input_ids"])
    assert prepare([CHATS[0]], CHATS, max_length=n).cut < prepare([CHATS[0]], CHATS, max_length=n - 1).cut


def test_number_of_samples(prepare):
    data = prepare(CHATS, HELD, max_train_samples=5, max_eval_samples=3)
    assert (len(data.train), len(data.heldout)) == (5, 3)
    assert same(data.train, list(prepare(CHATS, HELD).train)[:5])


@pytest.mark.parametrize("share, held", [(0.02, 1), (0.25, 5), (0.5, 10)])
def test_held_out_share(tokenizer, prepare, share, held):
    data = prepare(validation_split=share)
    both = words(tokenizer, data.train), words(tokenizer, data.heldout)
    assert len(both[1]) == held and not set(both[0]) & set(both[1])
    assert len(both[0]) + len(both[1]) == len(CHATS)


def test_blank_lines_are_nothing(prepare):
    lines = [json.dumps(c) for c in CHATS]
    assert len(prepare("\n\n" + "\n \n".join(lines) + "\n\n", CHATS).train) == len(CHATS)


def test_what_is_held_out_is_not_trained_on(prepare, mistake):
    message = mistake(prepare, CHATS, CHATS)
    assert "heldout.jsonl" in message and "train.jsonl" in message and "validation_split" in message
    data = prepare(CHATS, [*HELD[:3], *CHATS[4:6]])
    assert data.facts["shared"] == 2 and "2 held-out samples that are trained on" in "".join(report.losses(data.facts))
    assert prepare(CHATS, HELD).facts["shared"] == prepare(CHATS).facts["shared"] == 0


def test_a_longer_sample_with_truncation_off(prepare, mistake, tmp_path):
    message = mistake(prepare, [*CHATS[:2], chat("a", "b c d e f " * 100)], max_length=64, truncation=False)
    assert "train.jsonl, line 3" in message and "truncation" in message and "max_length is 64" in message
    assert prepare(max_length=64, truncation=False).cut == 0


def test_no_supervised_token_at_all(prepare, mistake):
    message = mistake(prepare, [chat("why " * 50, "so")] * 4, CHATS, max_length=16)
    assert "train.jsonl" in message and "within 16 tokens" in message and "max_length" in message
    message = mistake(prepare, CHATS, [chat("why " * 50, "so")], max_length=20)
    assert "heldout.jsonl" in message and "held-out" in message


# ---- sources ---------------------------------------------------------------------------------------------------------
def test_one_source_of_data(load, mistake, tokenizer, cache):
    both = load("--train_file", "x.jsonl", "--dataset_name", "python-docs")
    assert "both dataset_name and train_file" in mistake(sources.open_origins, both)
    # A flag's file takes the place of the recipe's data set.
    assert "'x.jsonl'" in mistake(sources.open_origins, load("--train_file", "x.jsonl"))
    assert "dataset_name" in mistake(sources.open_origins, load(data={"dataset_name": None}))
    missing = load(data={"dataset_name": None, "train_file": "no/such.jsonl"})
    assert "'no/such.jsonl'" in mistake(sources.open_origins, missing)


@pytest.mark.parametrize("splits, options", [
    ({"train": CHATS}, {"validation_split": 0.25}),
    ({"train": CHATS[:15], "test": CHATS[15:]}, {}),
], ids=["one split", "a part held out"])  # fmt: skip
def test_a_saved_data_set(load, tokenizer, saved, splits, options):
    settings = load(data={"dataset_name": saved(**splits), **options})
    data = only(preparing.prepare(settings, tokenizer))
    assert (len(data.train), len(data.heldout)) == (15, 5)


def test_a_saved_data_set_that_changes_is_encoded_anew(load, tokenizer, saved, tmp_path):

    first = preparing.prepare(load(data={"dataset_name": saved(train=CHATS)}), tokenizer)
    shutil.rmtree(tmp_path / "set")
    second = only(preparing.prepare(load(data={"dataset_name": saved(train=CHATS[:5])}), tokenizer))
    assert (len(second.train), len(second.heldout)) == (4, 1) and second.fingerprint != first.fingerprint


def test_a_validation_file_beside_a_data_set_is_used(load, tokenizer, saved, tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps(CHATS[0]) + "\n")
    options = {"dataset_name": saved(train=CHATS), "validation_file": str(tmp_path / "mine.jsonl")}
    data = only(preparing.prepare(load(data=options), tokenizer))
    assert (len(data.train), len(data.heldout)) == (20, 1)


def test_a_data_set_without_chats(load, tokenizer, saved, mistake):
    name = saved(train=[{"body": "abc"}])
    message = mistake(preparing.prepare, load(data={"dataset_name": name}), tokenizer)
    assert f"{name}, row 1" in message and "'messages'" in message and "'body'" in message
    name = saved("tested", test=CHATS, other=CHATS)
    assert "no train split" in mistake(preparing.prepare, load(data={"dataset_name": name}), tokenizer)


def test_a_directory_that_is_no_data_set(load, tokenizer, mistake, tmp_path):
    (tmp_path / "nothing").mkdir()
    message = mistake(preparing.prepare, load(data={"dataset_name": str(tmp_path / "nothing")}), tokenizer)
    assert "dataset_name" in message and "does not load" in message
