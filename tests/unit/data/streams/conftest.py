"""What the tests of streams share: sources of numbered samples, and streams whose windows a thread makes."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from brigade.train.data import prepare as preparing
from brigade.train.data import rows, stream
from brigade.train.host.cluster import World
from testing.streams import STEP


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
        data = {"dataset_name": None, "streaming": True, "chat_template": "none"} | data
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
