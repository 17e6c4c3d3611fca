"""What a run is about to train on, in figures and by one sample with its supervised part marked."""

import itertools
import sys
from typing import TYPE_CHECKING

import numpy as np

from ..recipe import Batch
from ..schema import DataSection, TrainingSection
from .prepare import Prepared
from .store import IGNORED, Samples
from .stream import Stream

if TYPE_CHECKING:
    from rich.text import Text

LONGEST = 700  # characters of the sample that is shown


def figures(prepared: Prepared, data: DataSection, training: TrainingSection, batch: Batch) -> str:
    """Samples and tokens, shares of supervised tokens and of padding, and what was cut or dropped."""
    facts = prepared.facts
    held = sum(map(len, prepared.heldout.values()))
    if data.streaming:
        return f"streamed, {held:,} held-out samples" + (", packed" if data.packing else "")
    words = [f"{facts['samples']:,} training and {held:,} held-out samples, {facts['tokens']:,} tokens, "
             f"{facts['supervised'] / facts['tokens']:.0%} supervised"]  # fmt: skip
    if len(facts["by_source"]) > 1:
        counts = zip(facts["by_source"], prepared.heldout, strict=True)
        words.append(" + ".join(f"{count:,} {name}" for count, name in counts))
    if data.packing:
        words.append(f"packed into {facts['sequences']:,} sequences, {packing_efficiency(prepared, data):.1%} full")
    words.append(f"{padding(prepared.train, training, batch):.0%} padding")
    if facts["cut"]:
        words.append(f"{facts['cut']:,} longer than max_length cut")
    if facts["split"]:
        words.append(f"{facts['split']:,} longer texts split into several samples")
    if facts["dropped"]:
        words.append(f"{facts['dropped']:,} without a supervised token dropped")
    return ", ".join(words)


def packing_efficiency(prepared: Prepared, data: DataSection) -> float:
    """Share of the packed sequences that tokens fill."""
    return prepared.facts["tokens"] / (prepared.facts["sequences"] * data.max_length)


def padding(rows: "Samples | Stream", training: TrainingSection, batch: Batch, steps: int = 200) -> float:
    """Share of padding in what will be computed: none end to end, else that of the first epoch's first steps."""
    if training.padding_free or isinstance(rows, Stream):
        return 0.0
    order = np.random.default_rng((training.seed, 0)).permutation(len(rows))[: steps * batch.global_size]
    lengths = rows.lengths()[order]
    micro = [lengths[i : i + batch.micro] for i in range(0, len(lengths), batch.micro)]
    return 1 - lengths.sum() / sum(len(part) * part.max() for part in micro)


def sample(prepared: Prepared, tokenizer: object) -> "Text":
    """The first sample decoded, its supervised part in green and underlined."""
    from rich.text import Text

    streamed = isinstance(prepared.train, Stream)  # it begins with training
    row = next(iter(prepared.heldout.values()))[0] if streamed else prepared.train[0]
    end = int(row["lengths"][0])
    ids, own = row["input_ids"][:end], row["labels"][:end] != IGNORED
    text = Text()
    bounds = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), end]
    colour = sys.stdout.isatty()
    for begin, stop in itertools.pairwise(bounds):
        part = tokenizer.decode(ids[begin:stop])  # type: ignore[attr-defined]
        if own[begin] and not colour:
            part = f"[[{part}]]"
        text.append(part, style="green underline" if own[begin] else "dim")
    if len(text) > LONGEST:
        text.truncate(LONGEST, overflow="ellipsis")
    return text
