"""Where a recipe's data comes from: files, several of them with weights, and saved data sets."""

import json
import shutil

from brigade.train.data import prepare as preparing
from brigade.train.data import sources
from testing.chats import CHATS, only


def test_a_broken_parquet_file(load, tokenizer, mistake, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then something else")
    asked = load(data={"dataset_name": None, "train_file": str(path)})
    assert str(path) in (message := mistake(preparing.prepare, asked, tokenizer)) and "Parquet" in message


def test_weights_that_do_not_add_up(load, tokenizer, mistake, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(c) + "\n" for c in CHATS))
    files = [{"train_file": str(tmp_path / "a.jsonl"), "weight": w, "name": f"s{w}"} for w in (0.5, 0.4)]
    asked = load(data={"dataset_name": None, "datasets": files})
    message = mistake(preparing.prepare, asked, tokenizer)
    assert "datasets" in message and "0.9" in message and "not 1" in message


def test_one_source_of_data(load, mistake, tokenizer, cache):
    both = load("--train_file", "x.jsonl", "--dataset_name", "python-docs")
    assert "both dataset_name and train_file" in mistake(sources.open_origins, both)
    # A flag's file takes the place of the recipe's data set.
    assert "'x.jsonl'" in mistake(sources.open_origins, load("--train_file", "x.jsonl"))
    assert "dataset_name" in mistake(sources.open_origins, load(data={"dataset_name": None}))
    missing = load(data={"dataset_name": None, "train_file": "no/such.jsonl"})
    assert "'no/such.jsonl'" in mistake(sources.open_origins, missing)


def test_a_saved_data_set(load, tokenizer, saved):
    name = saved(train=CHATS)
    data = only(preparing.prepare(load(data={"dataset_name": name, "validation_split": 0.25}), tokenizer))
    assert (len(data.train), len(data.heldout)) == (15, 5)


def test_a_saved_data_set_with_a_part_held_out(load, tokenizer, saved):
    name = saved(train=CHATS[:15], test=CHATS[15:])
    data = only(preparing.prepare(load(data={"dataset_name": name}), tokenizer))
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
