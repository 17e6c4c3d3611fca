"""What is read of a stream, and which of its windows lie on the disk."""

import time

from brigade.train.data import stream

STEP = 8  # rows


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


def hold(train, first, last):
    """Whether the windows from the one that holds row `first` to two behind that of row `last` are there, no others."""
    there = windows(train)
    return (
        bool(there) and there[0][0] <= first < there[0][1] and sum(end > last for _, end in there) == 1 + stream.AHEAD
    )
