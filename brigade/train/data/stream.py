"""Streaming: rows are read, tokenised and packed while training, a window at a time, for sets larger than the disk.

A process of each host keeps a few windows ahead in the cache and deletes those that are done. Nothing but the cursors at which a
window begins decides what is in it, neither ranks nor time, so that a checkpoint only has to hold those of its window.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UserError
from ...errors.disk import of_disk, writing
from ...errors.tables import Fields
from ..host import cache, processes
from ..host.checksums import write_manifest
from ..host.cluster import World
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import packing, sources, tokenizer_trial
from .encode import Encoder, LoadedEncoder
from .encoded import Encoded, refusal
from .keys import without_weight
from .layout import FORMAT
from .store import Samples, TokenSequence
from .tokenise import encoded, encoder_of
from .writer import Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 8192  # samples
HELD_OUT = 256  # samples, where a source has no split of its own
AHEAD = 2  # windows
STATE = "stream.json"  # in a checkpoint
FACTS = "facts.json"  # in a window


def check(settings: Settings) -> None:
    """Raise UserError for a recipe that streams without saying for how long, that says it in samples, that has several
    sources and no weights, or that learns what another model says of all rows before training."""
    data, training = settings.recipe.data, settings.recipe.training
    if objective_of(training).compares or training.teacher_top_k:
        problem = (
            f"objective {training.objective} needs all rows before training begins, and a stream has a window of them"
        )
        raise UserError(settings.place("streaming"), problem, "remove it: these rows are prepared once and cached")
    if training.max_steps < 1:
        problem = "a stream has no length, and max_steps is not set"
        raise UserError(settings.place("max_steps"), problem, "set max_steps")
    if data.max_train_samples:
        problem = "a stream is read for as long as the run goes"
        cure = "remove it: max_steps x global_batch_size sequences are trained on"
        raise UserError(settings.place("max_train_samples"), problem, cure)
    if data.datasets and len(data.datasets) > 1 and any(source.weight is None for source in data.datasets):
        problem = "streams have no sizes to mix by, and no weights are given"
        raise UserError(settings.place("datasets"), problem, "give every source a weight")


# ---- holding out -----------------------------------------------------------------------------------------------------
def hold_out(settings: Settings, encoder: Encoder, origins: list[sources.Origin], writer: Writer) -> Fields:
    """Store the held-out samples of all sources. Returns where training begins in each."""
    begins = [_hold_out(number, origin, settings, encoder, writer) for number, origin in enumerate(origins)]
    return {"format": FORMAT, "begins": begins}


def _hold_out(number: int, origin: sources.Origin, settings: Settings, encoder: Encoder, writer: Writer) -> object:
    """Store the held-out samples of a source: its own split's, or else its first ones. Returns where training begins."""
    loaded = LoadedEncoder(encoder)
    first_trained = next(origin.train.chunks(), None) if origin.heldout else None  # else encoded() tries it, below
    if first_trained:
        tokenizer_trial.check_rows(loaded.tokenizer, first_trained)
    wanted = settings.recipe.data.most_held_out or HELD_OUT
    rows, first, cursor, begins = origin.heldout or origin.train, writer.samples, None, None
    for part in encoded(rows, without_weight(origin.columns), encoder, 1, wanted):
        missing = first + wanted - writer.samples
        writer.add(part)
        if missing <= len(part.samples):
            begins = behind(cursor, part, missing)
            break
        cursor = begins = part.after
    if writer.samples == first:
        cure = "check that it has rows with answers, or raise max_length"
        raise UserError(rows.place, "it yields no samples with a supervised token", cure)
    if not origin.heldout and next(read_from(origin, loaded, begins), None) is None:
        problem = f"nothing is left to train on besides {writer.samples - first} samples that are held out"
        raise UserError(rows.place, problem, "set max_eval_samples lower, or name a validation_file")
    held = packing.Sequences.of_single(np.arange(first, min(writer.samples, first + wanted)))
    writer.split(f"heldout-{number}", held)
    return None if origin.heldout else begins


# ---- making windows ------------------------------------------------------------------------------------------------
def make_window(
    folder: Path,
    state: Fields,
    settings: Settings,
    loaded: LoadedEncoder,
    origins: list[sources.Origin],
    size: int,
) -> Fields:
    """Make the window that begins at `state` in `folder`. Returns the state of the next one."""
    recipe = settings.recipe
    writer = Writer(folder)
    cursors, samples = list(state["cursors"]), list(state["samples"])
    dropped = [np.zeros((0, 2), np.int64)]
    weights = [origin.weight or 1.0 for origin in origins]
    absent: dict[int, set[str]] = {}  # source -> names in its `columns` that none of its rows here has
    readers = [read_from(origin, loaded, cursor) for origin, cursor in zip(origins, cursors, strict=True)]
    while writer.samples < size:
        # the source that is furthest behind its share
        number = min(range(len(origins)), key=lambda i: samples[i] / weights[i])
        part = next(readers[number], None)
        if part is None:  # its end: from the beginning again, in the next window
            if state["cursors"][number] == state["begins"][number] and samples[number] == state["samples"][number]:
                problem = "it yields no training samples with a supervised token, besides those held out"
                cure = "check that it has rows with answers, raise max_length, or name a validation_file"
                raise UserError(origins[number].train.place, problem, cure)
            cursors[number] = state["begins"][number]
            break
        writer.add(part)
        absent[number] = absent.get(number, set(part.absent)) & part.absent
        dropped.append(part.dropped[:, 1:])
        cursors[number], samples[number] = part.after, samples[number] + len(part.samples)
    lengths = writer.table()["length"]
    packed = recipe.data.packing
    singles = packing.Sequences.of_single(np.arange(len(lengths)))
    sequences = packing.best_fit(lengths, recipe.data.max_length) if packed else singles
    order = np.random.default_rng((recipe.training.seed, state["number"])).permutation(len(sequences))
    writer.split("train", sequences.in_order(order))
    writer.close()
    number, first_row = state["number"] + 1, state["first_row"] + len(sequences)
    following = state | {"number": number, "first_row": first_row, "cursors": cursors, "samples": samples}
    (folder / "window.json").write_text(json.dumps(state))
    facts = writer.facts(np.arange(len(lengths)), np.concatenate(dropped))
    facts |= {"sequences": len(sequences), "number": state["number"], "absent": sorted(set().union(*absent.values()))}
    (folder / FACTS).write_text(json.dumps(facts))
    return following


def read_from(origin: sources.Origin, loaded: LoadedEncoder, cursor: object) -> Iterator[Encoded]:
    """Yield the chunks of a source, tokenised, from a cursor of its rows or from where `behind` says."""
    cursor, held = (cursor["cursor"], cursor["held"]) if isinstance(cursor, dict) else (cursor, 0)
    for chunk in origin.train.chunks(cursor):
        part = loaded.encode(chunk, origin.columns)
        if part.bad and not loaded.encoder.skip_bad_rows:
            raise refusal(part.error(*part.bad[0]), len(part.bad))
        yield part.behind(held) if held else part
        held = 0


def behind(cursor: object, part: Encoded, samples: int) -> object:
    """Return where training begins if a source's first samples are held out, the last of them being the first `samples` (at least
    one) of the chunk that was read at `cursor`: at the next row, so that no text lies on both sides."""
    if samples == len(part.samples):
        return part.after
    return {"cursor": cursor, "held": int(part.samples["row"][samples - 1]) + 1}


def _produce(folder: Path, state: Fields, settings: Settings, encoder: Encoder, size: int, parent: int) -> None:
    """Keep windows ahead of all ranks of this host, in a process that ends with its parent, or with its folder."""
    step = settings.recipe.training.global_batch_size
    kept: list[tuple[Path, int]] = []  # windows, each with the number of the sequence after its last one
    try:
        loaded, origins = LoadedEncoder(encoder), sources.open_origins(settings)
        while os.getppid() == parent and folder.is_dir():
            sent = signal.sigtimedwait({signal.SIGTERM}, 0)
            # Others signal all processes of a job, and the parent goes on for a step.
            if sent and sent.si_pid == parent:
                return
            reached = [int(path.read_text() or 0) for path in folder.glob("position-*")]  # by each rank
            while kept and kept[0][1] <= min(reached):
                shutil.rmtree(kept.pop(0)[0], ignore_errors=True)
            # Of small windows a step needs many.
            if sum(end > max(reached) for _, end in kept) > AHEAD and state["first_row"] >= max(reached) + 2 * step:
                time.sleep(0.2)
                continue
            aside = folder / f".{state['number']}"
            aside.mkdir()
            following = make_window(aside, state, settings, loaded, origins, size)
            end = following["first_row"]
            window = folder / f"window-{state['number']}-{state['first_row']}-{end}"
            write_manifest(aside, window.name)
            kept.append((aside.rename(window), end))
            state = following
    except Exception as error:
        if not folder.is_dir():  # the run is over
            return
        error = of_disk(error, folder.parent) or error
        message = error.args if isinstance(error, UserError) else [repr(error)]
        (folder / ".error").write_text(json.dumps(message))
        (folder / ".error").rename(folder / "error.json")


def _is_gone(file: Path) -> bool:
    """Whether the process whose number a file holds has ended, waited for or not. False without /proc."""
    try:
        number = file.read_text()
    except FileNotFoundError:  # not begun yet
        return False
    return bool(number) and Path("/proc/self").exists() and processes.status(int(number))[:1] in ([], ["Z"])


# ---- reading them --------------------------------------------------------------------------------------------------
@dataclass
class Stream:
    """The training sequences of a streaming run, by their number from the run's beginning.

    sequences: how many the whole run takes, max_steps x global batch; start: the state of the first window
    """

    streamed = True

    settings: Settings
    encoder: Encoder
    start: dict[str, Any]
    sequences: int
    folder: Path = Path()
    local_rank: int = 0
    size: int = WINDOW
    _window: tuple[int, int, Samples, np.ndarray] | None = field(default=None, repr=False)
    _process: Any = field(default=None, repr=False)
    _entered: int = 0  # the number after the last window that `entered` gave

    @classmethod
    def of_recipe(cls, settings: Settings, tokenizer: "PreTrainedTokenizerBase", begins: list[object]) -> "Stream":
        """Return the stream of a recipe. begins: for each source, the cursor at which training begins"""
        start = {"number": 0, "first_row": 0, "begins": begins, "cursors": begins, "samples": [0] * len(begins)}
        training = settings.recipe.training
        sequences = training.max_steps * training.global_batch_size
        return cls(settings, encoder_of(settings, tokenizer), start, sequences)

    def __len__(self) -> int:
        return self.sequences

    def open(self, world: World, checkpoint: Path | None, output: Path, token: int) -> None:
        """Start making this host's windows, from the checkpoint's on, in a folder of this launch; `token` tells launches
        apart."""
        state = json.loads((checkpoint / STATE).read_text()) if checkpoint else self.start
        run = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:12]
        home = cache.cache_directory("streams")
        self.folder, self.local_rank = home / f"{run}-{world.host}-{token}", world.local_rank
        if world.local_rank:
            return
        for old in home.glob(f"{run}-{world.host}-*"):
            shutil.rmtree(old, ignore_errors=True)
        with writing(home):
            cache.private_folder(self.folder)
            for rank in range(world.local_size):
                (self.folder / f"position-{rank}").write_text(str(state["first_row"]))
        # Spawned: a fork would take along the engines' threads and the GPU's context.
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_produce, daemon=True, args=(self.folder, state, self.settings, self.encoder, self.size, os.getpid())
        )
        # Signals are for this process: the new one inherits the mask, so that no moment passes without it, as one would with a
        # handler. Starting multiprocessing's tracker would clear it again (resource_tracker.py: _IGNORED_SIGNALS).
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        (self.folder / "pid").write_text(str(self._process.pid))  # here: it may die before it does anything

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.join()
            shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, sequence: int) -> TokenSequence:
        samples, number = self.in_window(sequence)
        return samples[number]

    def in_window(self, sequence: int) -> tuple[Samples, int]:
        """Return the window that holds a sequence, and the sequence's number there."""
        first, _, samples, _ = self._at(sequence)
        return samples, sequence - first

    def reach(self, sequence: int) -> None:
        """Say that this rank begins the step whose first sequence this is: windows before it may go."""
        with writing(self.folder):
            (self.folder / f"position-{self.local_rank}").write_text(str(sequence))

    def entered(self, sequences: range) -> Iterator[tuple[Samples, Fields]]:
        """Yield the windows of which these sequences are the first that are read, with their figures."""
        sequence, end = max(sequences.start, self._entered), min(sequences.stop, self.sequences)
        while sequence < end:
            _, sequence, samples, _ = self._at(sequence)
            self._entered = sequence
            yield samples, json.loads((samples.folder / FACTS).read_text())

    def step_supervised(self, sequences: range) -> float:
        """Return the supervised tokens of an optimizer step's sequences, over all ranks, each times its weight; 1 for none."""
        total: float = 0
        for sequence in sequences:
            first, _, _, counts = self._at(sequence)
            total += counts[sequence - first].item()
        return total or 1

    def save(self, checkpoint: Path, sequence: int) -> None:
        """Write down where the window of `sequence`, the next to be trained on, begins."""
        _, _, samples, _ = self._at(min(sequence, self.sequences - 1))
        shutil.copyfile(samples.folder / "window.json", checkpoint / STATE)

    def _at(self, sequence: int) -> tuple[int, int, Samples, np.ndarray]:
        """Return the window of a sequence: (its first number, the number after its last, sequences, what each counts)."""
        while self._window is None or not self._window[0] <= sequence < self._window[1]:
            for folder in self.folder.glob("window-*"):
                first, end = map(int, folder.name.split("-")[2:])
                if first <= sequence < end:
                    samples = Samples(folder, "train")
                    self._window = first, end, samples, samples.counted()
                    break
            else:
                if (self.folder / "error.json").exists():
                    message = json.loads((self.folder / "error.json").read_text())
                    if len(message) > 1:
                        raise UserError(*message)
                    raise RuntimeError(f"the stream's process failed: {message[0]}")
                if _is_gone(self.folder / "pid"):
                    raise RuntimeError("the stream's process was killed; was there too little memory?")
                time.sleep(0.05)
        return self._window
