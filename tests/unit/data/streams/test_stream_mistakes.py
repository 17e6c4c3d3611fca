"""Mistakes in a streamed recipe and its data, and processes that die."""

import json
import subprocess
from pathlib import Path

import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data import stream
from testing.streams import until, windows


@pytest.mark.parametrize("data, training, said", [
    ({}, {}, "no length"), ({"max_train_samples": 9}, {"max_steps": 2}, "data.max_train_samples"),
])  # fmt: skip
def test_a_stream_says_how_long_it_is_by_its_steps(load, source, tokenizer, mistake, data, training, said):
    data = {"dataset_name": None, "streaming": True} | data | source("a", 20)
    message = mistake(preparing.prepare, load(data=data, training=training), tokenizer)
    assert "max_steps" in message and said in message


def test_a_stream_of_several_sources_has_weights(load, source, tokenizer, mistake):
    data = {"dataset_name": None, "streaming": True, "datasets": [source("a", 20), source("b", 20)]}
    message = mistake(preparing.prepare, load(data=data, training={"max_steps": 2}), tokenizer)
    assert "datasets" in message and "weight" in message


def test_a_broken_row_far_behind_is_told_when_it_is_reached(streamed, source, mistake, texts):
    data = source("a", 100)
    file = Path(data["train_file"])
    file.write_text(file.read_text() + '{"prompt": 1}\n')
    train = streamed(data, size=10)
    assert len(texts(train, 0, 60)) == 60
    assert f"{data['train_file']}, line 101" in mistake(texts, train, 60, 130)


def test_nothing_is_left_to_train_on(streamed, source, mistake, texts):
    data = source("a", 3) | {"validation_file": None}
    message = mistake(streamed, data)
    assert data["train_file"] in message and "held out" in message and "validation_file" in message


def test_rows_without_a_supervised_token_do_not_go_on_for_ever(streamed, source, mistake, texts):
    data = source("a", 30)
    row = {"prompt": "why " * 10, "completion": "so"}
    Path(data["train_file"]).write_text(f"{json.dumps(row)}\n" * 60)
    message = mistake(texts, streamed(data | {"max_length": 8}), 0, 1)
    assert data["train_file"] in message and "supervised" in message and "max_length" in message


def test_a_killed_process_is_told(streamed, source, tmp_path):
    """By the system, for memory, say: nobody is left who could write why."""
    train = streamed(source("a", 20))
    until(lambda: windows(train))
    killed = subprocess.Popen(["sleep", "60"])
    (train.folder / "pid").write_text(str(killed.pid))
    assert not stream._is_gone(train.folder / "pid") and not stream._is_gone(tmp_path / "not begun")
    killed.kill()
    until(lambda: stream._is_gone(train.folder / "pid"))  # a zombie: nobody has waited for it
    with pytest.raises(RuntimeError, match="was killed"):
        train[10**6]
    killed.wait()
    assert stream._is_gone(train.folder / "pid")


def test_a_process_that_cannot_begin_is_told(streamed, source, monkeypatch):
    """It may die before its first line, or its disk may be full there: then the ranks waited for its windows for ever."""

    class Dies(subprocess.Popen):
        def __init__(self, **_):
            super().__init__(["false"])

        start, join = (lambda _: None), subprocess.Popen.wait

    monkeypatch.setattr(stream.multiprocessing, "get_context", lambda _: type("Here", (), {"Process": Dies}))
    with pytest.raises(RuntimeError, match="was killed"):
        streamed(source("a", 20))[0]
