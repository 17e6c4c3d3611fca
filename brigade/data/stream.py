"""Streaming: rows are read, tokenised and packed while training, a window at a time, for sets larger than the disk.

A process of each host keeps a few windows ahead in the cache and deletes those that are done. A window is made from the
cursors at which it begins, by nothing that depends on ranks or time, so a checkpoint holds only those of its window.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster import World
from ..errors import UserError
from ..flags import Settings
from . import cache, packing, sources
from .encode import Encoded, Encoder, Machine
from .sampling import GlobalBatches, Indices
from .store import Row, Samples, Writer

WINDOW = 8192  # samples
HELD_OUT = 256  # samples, where a source has no split of its own
AHEAD = 2  # windows
STATE = "stream.json"  # in a checkpoint


def check(settings: Settings) -> None:
    """Raises UserError for a recipe that streams without saying how long, or from several sources without weights."""
    data, training = settings.recipe.data, settings.recipe.training
    if training.max_steps < 1:
        raise UserError(
            settings.place("max_steps"), "a stream has no length, and max_steps is not set", "set max_steps"
        )
    if data.datasets and len(data.datasets) > 1 and any(source.weight is None for source in data.datasets):
        raise UserError(settings.place("datasets"), "streams have no sizes to mix by, and no weights are given",
                        "give every source a weight")  # fmt: skip


# ---- making windows ------------------------------------------------------------------------------------------------
def begin(heldout_ends: list[Any]) -> dict[str, Any]:
    """The state before the first window: where each source's training rows begin, and where it stands."""
    return {
        "number": 0,
        "first_row": 0,
        "begins": heldout_ends,
        "cursors": heldout_ends,
        "samples": [0] * len(heldout_ends),
    }


def build(folder: Path, state: dict[str, Any], settings: Settings, machine: Machine, found: list[sources.Origin],
          size: int) -> dict[str, Any]:  # fmt: skip
    """Make the window that begins at `state` in `folder`; returns the state of the next one."""
    recipe = settings.recipe
    writer, counts = Writer(folder), {"cut": 0, "dropped": 0}
    cursors, samples = list(state["cursors"]), list(state["samples"])
    weights = [origin.weight or 1.0 for origin in found]
    readers = [_read(origin, machine, cursor) for origin, cursor in zip(found, cursors, strict=True)]
    while writer.samples < size:
        number = min(range(len(found)), key=lambda i: samples[i] / weights[i])  # who is furthest behind its share
        part = next(readers[number], None)
        if part is None:  # its end: from the beginning again, in the next window
            if cursors[number] == state["begins"][number]:
                raise UserError(found[number].train.place, "it yields no samples with a supervised token",
                                "check that it has rows with answers, or raise max_length")  # fmt: skip
            cursors[number] = state["begins"][number]
            break
        writer.add(part)
        counts = {"cut": counts["cut"] + part.cut, "dropped": counts["dropped"] + part.dropped}
        cursors[number], samples[number] = part.after, samples[number] + len(part.lengths)
    lengths = writer.lengths()
    rows = (
        packing.best_fit(lengths, recipe.data.max_length) if recipe.data.packing else [[i] for i in range(len(lengths))]
    )
    order = np.random.default_rng((recipe.training.seed, state["number"])).permutation(len(rows))
    writer.split("train", [rows[i] for i in order])
    writer.close()
    following = state | {"number": state["number"] + 1, "first_row": state["first_row"] + len(rows), "cursors": cursors,
                         "samples": samples}  # fmt: skip
    (folder / "window.json").write_text(json.dumps({"state": state, "next": following, **counts}))
    return following


def _read(origin: sources.Origin, machine: Machine, cursor: Any) -> Iterator[Encoded]:
    return (machine.encode(chunk, origin.columns) for chunk in origin.train.chunks(cursor))


def _produce(folder: Path, state: dict[str, Any], settings: Settings, encoder: Encoder, size: int, parent: int) -> None:
    """The process that keeps windows ahead of all ranks of its host. Ends with its parent."""
    try:
        machine, found = Machine(encoder), sources.origins(settings)
        while os.getppid() == parent:
            positions = [int(path.read_text() or 0) for path in folder.glob("position-*")] or [state["number"]]
            for old in folder.glob("window-*"):
                if int(old.name.rpartition("-")[2]) < min(positions) - 1:
                    shutil.rmtree(old, ignore_errors=True)
            if state["number"] > max(positions) + AHEAD:
                time.sleep(0.2)
                continue
            aside = folder / f".{state['number']}"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            following = build(aside, state, settings, machine, found, size)
            aside.rename(folder / f"window-{state['number']}")
            state = following
    except Exception as error:
        told = [error.place, error.problem, error.cure] if isinstance(error, UserError) else [repr(error)]
        (folder / ".error").write_text(json.dumps(told))
        (folder / ".error").rename(folder / "error.json")


class StreamBatches(GlobalBatches):
    """GlobalBatches of a stream, whose windows are shuffled already: rows by their number."""

    def __iter__(self) -> Iterator[Indices]:
        each = self.micro * self.accumulation * self.world_size
        for first in range(0, self.samples, each):
            step = np.arange(first, first + each).reshape(self.accumulation, self.world_size, self.micro)
            for micro_batch in step[:, self.rank]:
                yield Indices(micro_batch.tolist(), rows=range(first, first + each))


# ---- reading them --------------------------------------------------------------------------------------------------
@dataclass
class Stream:
    """The training rows of a streaming run, by their number from the run's beginning.

    rows: of the whole run, max_steps x global batch
    """

    settings: Settings
    encoder: Encoder
    start: dict[str, Any]
    rows: int
    folder: Path = Path()
    local_rank: int = 0
    size: int = WINDOW
    _window: tuple[int, int, Samples, np.ndarray] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.rows

    def open(self, world: World, checkpoint: Path | None, output: Path, token: int) -> None:
        """Start this host's windows at the checkpoint's, in a folder of this launch; `token` tells launches apart."""
        state = json.loads((checkpoint / STATE).read_text()) if checkpoint else self.start
        run = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:12]
        home = cache.cache_directory() / "streams"
        self.folder, self.local_rank = home / f"{run}-{world.host}-{token}", world.local_rank
        self.start = state
        if world.local_rank:
            return
        for old in home.glob(f"{run}-{world.host}-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # Spawned: a fork would take along the engines' threads and the GPU's context.
        context = multiprocessing.get_context("spawn")
        context.Process(target=_produce, daemon=True, args=(
            self.folder, state, self.settings, self.encoder, self.size, os.getpid())).start()  # fmt: skip

    def close(self) -> None:
        if not self.local_rank:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, row: int) -> Row:
        first, _, samples, _ = self._at(row)
        return samples[row - first]

    def step_supervised(self, rows: range) -> int:
        """Supervised tokens of an optimizer step's rows, over all ranks."""
        total = 0
        for row in rows:
            first, _, _, counts = self._at(row)
            total += int(counts[row - first])
        return total

    def save(self, checkpoint: Path, row: int) -> None:
        """Write where the window of `row`, the next to be trained on, begins."""
        _, number, _, _ = self._at(min(row, self.rows - 1))
        window = json.loads((self.folder / f"window-{number}" / "window.json").read_text())
        (checkpoint / STATE).write_text(json.dumps(window["state"]))

    def _at(self, row: int) -> tuple[int, int, Samples, np.ndarray]:
        """(its first row, number, samples, supervised tokens a row) of the window that holds a row."""
        first, number = (
            (self._window[0], self._window[1]) if self._window else (self.start["first_row"], self.start["number"])
        )
        while True:
            if self._window is None or self._window[1] != number:
                self._window = self._load(number)
            first, _, samples, _ = self._window
            if row < first:  # a step may reach back over a window's border
                number -= 1
            elif row >= first + len(samples):
                number += 1
            else:
                return self._window

    def _load(self, number: int) -> tuple[int, int, Samples, np.ndarray]:
        folder, error = self.folder / f"window-{number}", self.folder / "error.json"
        position = self.folder / f"position-{self.local_rank}-{os.getpid()}"
        while not folder.is_dir():
            if error.exists():
                told = json.loads(error.read_text())
                raise UserError(*told) if len(told) == 3 else RuntimeError(f"the stream's process failed: {told[0]}")
            with suppress(OSError):  # the folder itself is made by this host's first rank
                position.write_text(str(number))
            time.sleep(0.05)
        position.write_text(str(number))
        samples = Samples(folder, "train")
        first = json.loads((folder / "window.json").read_text())["state"]["first_row"]
        return first, number, samples, samples.supervised()
