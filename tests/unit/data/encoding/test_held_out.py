"""How many samples are trained on and held out, and which are cut or dropped, whatever source they are from."""

import json
import shutil

import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data import report, sources
from testing.chats import CHATS, HELD, chat, only, words


def test_a_sample_longer_than_max_length_loses_its_end_and_one_of_just_so_many_tokens_nothing(tokenizer, prepare):
    long = [chat("a", "b c d e f " * 100)]
    n = len(prepare(long, CHATS).train[0]["input_ids"])
    whole, less, few = (prepare(long, CHATS, max_length=most) for most in (n, n - 1, 64))
    assert (whole.cut, less.cut, few.cut) == (0, 1, 1) and len(few.train[0]["input_ids"]) == 64
    (learned,) = words(tokenizer, few.train)
    assert learned.startswith("b c d") and "<|im_end|>" not in learned


def test_what_is_held_out_is_not_trained_on(prepare, mistake):
    message = mistake(prepare, CHATS, CHATS)
    assert "heldout.jsonl" in message and "train.jsonl" in message and "validation_split" in message
    data = prepare(CHATS, [*HELD[:3], *CHATS[4:6]])
    assert data.facts["shared"] == 2 and "2 held-out samples that are trained on" in "".join(report.losses(data.facts))
    assert prepare(CHATS, HELD).facts["shared"] == prepare(CHATS).facts["shared"] == 0


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
    shutil.rmtree(tmp_path / "saved")
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


def test_a_directory_that_is_no_data_set(load, tokenizer, mistake, tmp_path):
    (tmp_path / "nothing").mkdir()
    message = mistake(preparing.prepare, load(data={"dataset_name": str(tmp_path / "nothing")}), tokenizer)
    assert "dataset_name" in message and "does not load" in message
