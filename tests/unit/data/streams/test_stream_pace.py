"""Ranks read a stream at any pace, begin anywhere, and continue it from any step; each sample once a pass, by weights."""

import json
import time

import pyarrow
import pyarrow.parquet
import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data import rows, stream
from brigade.train.data.store import IGNORED
from testing import marks
from testing.streams import STEP, hold, numbers, until, windows


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
    until(lambda: hold(fast, 160, 160))
    fast.reach(320)
    until(lambda: hold(fast, 160, 320))
    time.sleep(0.5)
    assert hold(fast, 160, 320), "the slow rank still needs the first of them"
    assert texts(slow, 160, 165, reach=False) == texts(fast, 160, 165, reach=False)
    slow.reach(320)
    until(lambda: hold(fast, 320, 320))


def test_a_process_that_loads_rows_begins_anywhere(streamed, source, texts):
    """Workers of a DataLoader each look for their own first row, and nobody has read what lies before it."""
    train, other = streamed(source("a", 300), ranks=2, steps=50)
    for reader in (train, other):
        reader.reach(120)
    until(lambda: hold(train, 120, 120))
    assert texts(train, 120, 140, reach=False) == texts(other, 120, 140, reach=False)


def test_the_folder_is_removed_in_the_end(streamed, source, texts):
    first, second = streamed(source("a", 50), ranks=2)
    second.close()
    assert first.folder.is_dir()
    first.close()
    assert not first.folder.exists()


@pytest.mark.parametrize("step, packing", marks.cases((2, True), (11, False), slow=[(2, False), (11, True)]))
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


# ---- samples ---------------------------------------------------------------------------------------------------------
JOINED = {"dataset_name": None, "streaming": True, "chat_template": "none"}  # as the fixture `streamed` reads pairs


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
    settings = load(data=JOINED | {"max_eval_samples": 5} | data, training={"max_steps": 2})
    held = [tokenizer.decode(row["input_ids"][:-1]) for row in preparing.prepare(settings, tokenizer).heldout["a"]]
    assert numbers(held) == [0, 1, 2, 3, 4]
    found = numbers(texts(streamed(data | {"max_eval_samples": 5}, steps=50), 0, 400))
    assert sorted(found[:195]) == [*range(5, 200)], "all the rest is trained on, once a pass"
    assert not set(found) & set(numbers(held))


def test_held_out_is_what_is_said_of_a_source_of_one_chunk(streamed, source, load, tokenizer, texts, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 20)
    data = source("a", 600) | {"validation_file": None}
    settings = load(data=JOINED | data, training={"max_steps": 2})
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
