"""Streams: windows that depend on the recipe alone, read by ranks at any pace, and continued from any step."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brigade.cluster import World
from brigade.data import builtin, report_window, rows, stream
from brigade.data import prepare as preparing
from brigade.data.cache import cache_directory
from brigade.data.store import IGNORED
from brigade.recipe.batch import Batch

STEP = 8  # rows


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin.ensure(cache_directory()).tokenizer)


@pytest.fixture(autouse=True)
def small(tmp_path_factory, monkeypatch):
    """A cache of the test's own; chunks of a few rows."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(rows, "CHUNK_BYTES", 400)


@pytest.fixture
def source(tmp_path):
    """source(name, count): such a source of a recipe, its samples numbered, with one held out."""

    def call(name, count, weight=None):
        for file, numbers in ((name, range(count)), (f"held-{name}", [count])):
            lines = [json.dumps({"prompt": f"{name}", "completion": f" {i}"}) + "\n" for i in numbers]
            (tmp_path / f"{file}.jsonl").write_text("".join(lines))
        files = {"train_file": str(tmp_path / f"{name}.jsonl"), "validation_file": str(tmp_path / f"held-{name}.jsonl")}
        return files if weight is None else files | {"name": name, "weight": weight}

    return call


@pytest.fixture
def streamed(load, tokenizer, tmp_path, monkeypatch):
    """streamed(data, size=..., ranks=...): the stream of each local rank, its windows made by a thread of this process."""

    class Thread(threading.Thread):
        """What a process would be: one that can be ended."""

        pid = os.getpid()

        def __init__(self, target, daemon, args):
            super().__init__(target=target, daemon=daemon, args=(*args[:-1], self))
            self.alive = True

        def __eq__(self, parent):
            return self.alive

        __hash__ = threading.Thread.__hash__

        def kill(self):
            self.alive = False

    monkeypatch.setattr(stream.multiprocessing, "get_context", lambda _: type("Here", (), {"Process": Thread}))
    opened = []

    def call(data, size=30, ranks=1, steps=20, checkpoint=None, token=1, **training):
        data = {"dataset_name": None, "streaming": True} | data
        settings = load(data=data, training={"max_steps": steps, "global_batch_size": STEP} | training)
        found = []
        for rank in range(ranks):
            train = preparing.prepare(settings, tokenizer).train
            train.size = size
            train.open(World(rank, rank, ranks, ranks, "here", "torchrun"), checkpoint, tmp_path / "run", token)
            found.append(train)
        opened.extend(found)
        return found if ranks > 1 else found[0]

    yield call
    for train in opened:
        train.close()


@pytest.fixture
def texts(tokenizer):
    """texts(stream, first, end): the samples of these rows, as text, read as a run reads them or ahead of its steps."""

    def call(train, first, end, reach=True):
        found = []
        for number in range(first, end):
            if reach:
                train.reach(number // STEP * STEP)
            row = train[number]
            ends = row["lengths"].cumsum()[:-1]
            found += [tokenizer.decode(part).removesuffix("<|im_end|>") for part in np.split(row["input_ids"], ends)]
        return found

    return call


def numbers(texts, name="a"):
    return [int(text.split()[1]) for text in texts if text.startswith(f"{name} ")]


def windows(train):
    """(first row, row behind the last) of the windows on the disk."""
    return sorted(tuple(map(int, path.name.split("-")[2:])) for path in train.folder.glob("window-*"))


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


# ---- which samples -----------------------------------------------------------------------------------------------
def test_every_sample_of_a_pass_once_and_then_again(streamed, source, texts):
    train = streamed(source("a", 50), steps=20)
    assert len(train) == 20 * STEP
    found = numbers(texts(train, 0, 100))
    assert sorted(found[:50]) == sorted(found[50:]) == list(range(50))
    assert found[:50] != sorted(found[:50]), "shuffled within a window"
    assert found[:50] != found[50:], "another order in the second pass"


def test_packed_rows_hold_each_sample_once(streamed, source, texts):
    data = source("a", 50) | {"packing": True, "max_length": 40}
    train = streamed(data, size=50)
    train[0]
    (window,) = (path for path in train.folder.glob("window-0-*"))
    count = int(window.name.split("-")[3])
    assert count < 25 and sorted(numbers(texts(train, 0, count, reach=False))) == list(range(50))
    for row in map(train.__getitem__, range(count)):
        assert row["lengths"].sum() == len(row["input_ids"]) == len(row["labels"]) <= 40


@pytest.mark.parametrize("weights", [(0.75, 0.25), (0.5, 0.5)])
def test_weights_are_shares_of_every_window(streamed, source, texts, weights):
    sources = [source(name, 200, weight) for name, weight in zip("ab", weights, strict=True)]
    found = texts(streamed({"datasets": sources}, size=80), 0, 160)
    for first in (0, 80):
        share = len(numbers(found[first : first + 80])) / 80
        assert share == pytest.approx(weights[0], abs=0.1)  # a chunk of rows is not divided
    assert len(set(found)) == 160, "none twice before its source has ended"


def test_the_seed_decides_the_order(streamed, source, texts):
    data = source("a", 50)
    found = [texts(streamed(data, token=n, seed=seed), 0, 50) for n, seed in enumerate((1, 1, 2))]
    assert found[0] == found[1] != found[2] and sorted(found[0]) == sorted(found[2])


def test_a_source_without_a_held_out_part_holds_out_its_begin(streamed, source, load, tokenizer, texts):
    data = source("a", 200) | {"validation_file": None}
    settings = load(
        data={"dataset_name": None, "streaming": True, "max_eval_samples": 5} | data, training={"max_steps": 2}
    )
    held = [tokenizer.decode(row["input_ids"][:-1]) for row in preparing.prepare(settings, tokenizer).heldout["a"]]
    assert numbers(held) == [0, 1, 2, 3, 4]
    found = numbers(texts(streamed(data | {"max_eval_samples": 5}, steps=50), 0, 400))
    assert sorted(found[:195]) == [*range(5, 200)], "all the rest is trained on, once a pass"
    assert not set(found) & set(numbers(held))


def test_held_out_is_what_is_said_of_a_source_of_one_chunk(streamed, source, load, tokenizer, texts, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 20)
    data = source("a", 600) | {"validation_file": None}
    settings = load(data={"dataset_name": None, "streaming": True} | data, training={"max_steps": 2})
    (held,) = preparing.prepare(settings, tokenizer).heldout.values()
    assert len(held) == stream.HELD_OUT
    train = streamed(data, steps=100)
    assert sorted(numbers(texts(train, 0, 344))) == [*range(256, 600)] == sorted(numbers(texts(train, 344, 688)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_streamed_data_set_holds_out_its_begin(streamed, load, tokenizer, tmp_path, texts, monkeypatch, kind):
    """Streamed from its shards; a run that continues does where it was."""
    monkeypatch.setattr(rows, "CHUNK_ROWS", 4)
    for shard in range(2):
        lines = [{"text": f"a {shard * 50 + i}"} for i in range(50)]
        path = tmp_path / "set" / f"train-{shard}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path, row_group_size=10)
        else:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"dataset_name": str(tmp_path / "set"), "max_eval_samples": 6}
    settings = load(data={"streaming": True} | data, training={"max_steps": 20, "global_batch_size": STEP})
    (held,) = preparing.prepare(settings, tokenizer).heldout.values()
    assert numbers(tokenizer.decode(row["input_ids"][:-1]) for row in held) == [*range(6)]
    train = streamed(data, size=24)
    found = numbers(texts(train, 0, 94))
    assert sorted(found) == [*range(6, 100)], "every row but those that were held out, once"
    train.save(tmp_path, 94)
    expected = texts(train, 94, 150)
    again = streamed(data, size=24, checkpoint=tmp_path, token=2)
    assert texts(again, 94, 150) == expected and not set(numbers(expected)) & set(range(6))


# ---- at any pace -------------------------------------------------------------------------------------------------
def test_windows_wait_for_a_reader_that_comes_late(streamed, source, texts):
    """The first step begins after the engine is built and the untrained model evaluated: minutes, for a large one."""
    train = streamed(source("a", 200))
    until(lambda: len(windows(train)) == 1 + stream.AHEAD)
    time.sleep(0.5)
    assert len(windows(train)) == 1 + stream.AHEAD and windows(train)[0][0] == 0, "no more ahead, and none is gone"
    assert len(texts(train, 0, 30)) == 30


@pytest.mark.parametrize("size", [1, 5, 30])
def test_a_slow_rank_finds_what_a_fast_one_has_read(streamed, source, size, texts):
    """Windows may be smaller than a step: packing makes one row of many samples."""
    fast, slow = streamed(source("a", 7), size=size, ranks=2)
    seen = {0: [], 1: []}
    for step in range(6):
        first = step * STEP
        for rank, train in enumerate((fast, slow)):
            train.reach(first)
            assert train.step_supervised(range(first, first + STEP)) > 0
            seen[rank] += texts(train, first, first + STEP, reach=False)
    assert seen[0] == seen[1]


def test_what_is_done_is_deleted(streamed, source, texts):
    fast, slow = streamed(source("a", 500), ranks=2, steps=50)
    for train in (fast, slow):
        train.reach(160)
    until(lambda: _hold(fast, 160, 160))
    fast.reach(320)
    until(lambda: _hold(fast, 160, 320))
    time.sleep(0.5)
    assert _hold(fast, 160, 320), "the slow rank still needs the first of them"
    assert texts(slow, 160, 165, reach=False) == texts(fast, 160, 165, reach=False)
    slow.reach(320)
    until(lambda: _hold(fast, 320, 320))


def _hold(train, first, last):
    """Whether the windows from the one that holds row `first` to two behind that of row `last` are there, no others."""
    there = windows(train)
    return (
        bool(there) and there[0][0] <= first < there[0][1] and sum(end > last for _, end in there) == 1 + stream.AHEAD
    )


def test_a_process_that_loads_rows_begins_anywhere(streamed, source, texts):
    """Workers of a DataLoader each look for their own first row, and nobody has read what lies before it."""
    train, other = streamed(source("a", 300), ranks=2, steps=50)
    for reader in (train, other):
        reader.reach(120)
    until(lambda: _hold(train, 120, 120))
    assert texts(train, 120, 140, reach=False) == texts(other, 120, 140, reach=False)


def test_the_folder_is_removed_in_the_end(streamed, source, texts):
    first, second = streamed(source("a", 50), ranks=2)
    second.close()
    assert first.folder.is_dir()
    first.close()
    assert not first.folder.exists()


# ---- figures -----------------------------------------------------------------------------------------------------
@pytest.fixture
def uneven(source):
    """60 rows, of which each tenth is a long answer, and each tenth a long question without a place for its answer."""

    def call():
        data = source("a", 60)
        file = Path(data["train_file"])
        lines = file.read_text().splitlines()
        for i in range(0, 60, 10):
            lines[i] = json.dumps({"prompt": "a", "completion": f" {i}" * 60})
            lines[i + 5] = json.dumps({"prompt": "a " * 60, "completion": "b"})
        file.write_text("\n".join(lines) + "\n")
        return data | {"max_length": 40}

    return call


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
        return report_window.window(samples, facts | {"number": number}, recipe.data, recipe.training, batch, whole)

    ((samples, facts),) = streamed(uneven(), size=54).entered(range(1))
    share = f"{facts['supervised'] / facts['tokens']:.0%}"
    lost = "12 longer than max_length cut, 6 without a supervised token dropped"
    assert said() == (
        f"first window of the stream: 54 training samples, {facts['tokens']} tokens, {share} supervised, "
        f"0% padding, {lost}"
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


# ---- continuing --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("step", [2, 11])
def test_a_continued_stream_has_the_rows_of_the_uninterrupted_one(streamed, source, tmp_path, texts, step, packing):
    sources = [source("a", 50, 0.8), source("b", 9, 0.2)]
    data = {"datasets": sources, "packing": packing, "max_length": 40}
    train = streamed(data)
    texts(train, 0, step * STEP)
    train.save(tmp_path, step * STEP)
    expected = texts(train, step * STEP, 15 * STEP)
    assert step < 11 or json.loads((tmp_path / stream.STATE).read_text())["number"] > 0
    train._process.kill()
    train._process.join()
    again = streamed(data, checkpoint=tmp_path, token=2)
    assert not train.folder.exists(), "what an interrupted run left is swept"
    assert texts(again, step * STEP, 15 * STEP) == expected
    last = range(14 * STEP, 15 * STEP)
    assert again.step_supervised(last) == sum(int((again[row]["labels"] != IGNORED).sum()) for row in last)


def test_the_last_checkpoint_is_one_of_a_run_that_is_done(streamed, source, tmp_path):
    train = streamed(source("a", 50), steps=5)
    train.save(tmp_path, 5 * STEP)
    assert json.loads((tmp_path / stream.STATE).read_text())["first_row"] < 5 * STEP


# ---- mistakes ----------------------------------------------------------------------------------------------------
def test_a_stream_says_how_long_it_is(load, source, tokenizer, mistake):
    settings = load(data={"dataset_name": None, "streaming": True} | source("a", 20))
    message = mistake(preparing.prepare, settings, tokenizer)
    assert "max_steps" in message and "no length" in message


def test_a_stream_has_no_number_of_samples(load, source, tokenizer, mistake):
    data = {"dataset_name": None, "streaming": True, "max_train_samples": 9} | source("a", 20)
    message = mistake(preparing.prepare, load(data=data, training={"max_steps": 2}), tokenizer)
    assert "data.max_train_samples" in message and "max_steps" in message


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
    message = mistake(texts, train, 60, 130)
    assert f"{data['train_file']}, line 101" in message


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
