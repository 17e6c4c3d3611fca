"""What a run says of the windows of a stream, of mistakes in it, and of processes that die."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data import report, stream
from brigade.train.data.store import IGNORED
from brigade.train.recipe.batch import Batch
from testing.streams import STEP, until, windows


@pytest.mark.parametrize("packing", [False, True])
def test_a_window_has_figures_of_what_is_in_it(streamed, uneven, packing):
    train = streamed(uneven() | {"packing": packing}, size=54)
    ((samples, facts),) = train.entered(range(1))
    rows_ = list(samples)
    assert facts["sequences"] == len(rows_) and facts["samples"] == sum(len(row["lengths"]) for row in rows_) == 54
    assert facts["tokens"] == sum(len(row["labels"]) for row in rows_) and facts["longest"] == 40
    assert facts["supervised"] == sum((row["labels"] != IGNORED).sum() for row in rows_)
    assert [facts[key] for key in ("cut", "split", "dropped", "number")] == [12, 0, 6, 0]


def test_each_window_is_told_once_and_a_step_may_enter_several(streamed, source):
    train = streamed(source("a", 7), size=5, steps=3)
    told = []
    for step in range(3):
        train.reach(step * STEP)
        told += [facts for _, facts in train.entered(range(step * STEP, step * STEP + STEP))]
    numbers_ = [facts["number"] for facts in told]
    assert numbers_ == sorted(set(numbers_)) and len(told) >= 4, "a window holds at most the 7 rows of a pass"
    begins = np.cumsum([0] + [facts["sequences"] for facts in told])
    assert begins[-2] < 3 * STEP <= begins[-1], "without a gap"
    assert not list(train.entered(range(STEP * 2, STEP * 3)))


def test_a_run_that_continues_begins_to_tell_where_it_is(streamed, source, tmp_path):
    train = streamed(source("a", 50), steps=20)
    for step in range(11):
        train.reach(step * STEP)
        list(train.entered(range(step * STEP, step * STEP + STEP)))
    train.save(tmp_path, 11 * STEP)
    again = streamed(source("a", 50), checkpoint=tmp_path, token=2)
    (_, facts), *_ = again.entered(range(11 * STEP, 12 * STEP))
    assert facts["number"] == json.loads((tmp_path / stream.STATE).read_text())["number"] > 0


def test_the_figures_of_a_window_as_they_are_told(streamed, uneven, load):
    def said(number=0, whole=True, packing=False, padding_free=True, micro=1):
        settings = load(data={"max_length": 40, "packing": packing}, training={"padding_free": padding_free})
        batch = Batch(32, micro, 32 // micro, 1, 1.0)
        recipe = settings.recipe
        return report.window_figures(samples, facts | {"number": number}, recipe.data, recipe.training, batch, whole)

    ((samples, facts),) = streamed(uneven(), size=54).entered(range(1))
    share = f"{facts['supervised'] / facts['tokens']:.0%}"
    lost = "12 longer than max_length cut, 6 without a supervised token dropped"
    assert said() == (
        f"first window of the stream: 54 training samples, {facts['tokens']} tokens, {share} supervised, "
        f"0% padding, {lost}, 54 pairs of prompt and completion joined as they are, for no chat template is set"
    )
    assert said(3, whole=False) == f"window 4 of the stream: {lost}"
    full = facts["tokens"] / (54 * 40)
    assert f"packed into 54 sequences, {full:.1%} full, 0% padding" in said(packing=True)
    lengths = samples.lengths()[:52].reshape(-1, 4), samples.lengths()[52:].reshape(-1, 2)  # in the order of training
    slots = sum(int((part.max(1) * part.shape[1]).sum()) for part in lengths)
    assert f"{1 - facts['tokens'] / slots:.0%} padding" in said(padding_free=False, micro=4)
    assert said(padding_free=False, micro=1).count(" 0% padding") == 1
    facts |= {"cut": 0, "dropped": 0}
    assert said(3, whole=False) == "" and said(3).startswith("window 4 of the stream: 54 training samples")


def test_a_column_that_no_row_of_the_first_window_has_is_told(streamed, source, load):
    """What follows may have it: nothing is refused."""
    ((samples, facts),) = streamed(source("a", 20) | {"columns": {"system": "sis"}}, size=10).entered(range(1))
    recipe = load().recipe
    said = report.window_figures(samples, facts, recipe.data, recipe.training, Batch(32, 1, 32, 1, 1.0), True)
    assert "no row has a column 'sis', which data.columns names" in said


# ---- mistakes --------------------------------------------------------------------------------------------------------
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
