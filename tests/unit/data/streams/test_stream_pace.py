"""Ranks read a stream at any pace, begin anywhere, and continue it from any step."""

import json
import time

import pytest

from brigade.train.data import stream
from brigade.train.data.store import IGNORED
from testing.streams import STEP, hold, until, windows


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
