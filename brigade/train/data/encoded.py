"""The samples that a chunk of rows became, and the error that ends a run where rows cannot be used. Imports no torch."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import UserError
from .images import ImageSource
from .rows import BadRow, Where

# What became of a row. Longer than max_length, it is cut off there, or split into several samples; empty (nothing but white
# space) or bad (it cannot be used), it is skipped.
WHOLE, CUT, SPLIT, EMPTY, BAD = range(5)
MOST_LOST = 0.05  # of the samples may be dropped without a warning
# Counted for a row, with its first sample: answers whose thoughts are cut; special tokens in texts and answers, which stay
# special; special tokens in other turns, which become plain text; pairs of texts joined without a template.
COUNTED = ("thoughts", "control", "plain", "joined")
# A sample: its tokens, how many of them are supervised, its fate (of several from one text the first says SPLIT), its row's
# number in the chunk, what of that row nobody read (an index into Encoded.unread), a digest of its tokens, whether it is a
# desirable answer (samples.Text), how many tokens stand before the first supervised one, and the weight of its loss.
SAMPLE = np.dtype(
    [
        (name, np.int64)
        for name in ("length", "supervised", "fate", "row", *COUNTED, "unread", "digest", "desirable", "prompt")
    ]
    + [("weight", np.float64)]
)


def entry(
    tokens: np.ndarray,
    own: np.ndarray,
    fate: int,
    row: int,
    counts: tuple[int, ...],
    desirable: bool,
    images: tuple[ImageSource, ...] = (),
    weight: float = 1.0,
) -> tuple[float, ...]:
    """Return a sample's SAMPLE.

    tokens, own: its token ids, and which of them are supervised; counts: of COUNTED, and what nobody read
    images: those among its tokens, which are a part of its digest; weight: of its loss
    """
    content = tokens.tobytes() + b"".join(image.digest for image in images)
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
    return len(tokens), int(own.sum()), fate, row, *counts, digest, int(desirable), int(own.argmax()), weight


@dataclass
class Encoded:
    """The samples of a chunk, laid end to end; of pairs the better answer and then the worse one.

    tokens: int32 (tokens of all samples,); supervised: bool, likewise; samples: a SAMPLE for each
    dropped: int64 (rows, 3): for each row that is EMPTY, BAD or without a supervised token within max_length, how many samples
        stand before it, its fate, and the smallest max_length with a supervised token (0: there is none)
    rows: how many the chunk has, blank lines among them; where, size, after: the chunk's own
    bad: number and error of each row that is BAD
    unread: keys and columns that nobody read, in words; each set once, the first empty
    absent: names in data.columns that no row of the chunk has
    images: of each sample, where rows may have images; else []
    """

    tokens: np.ndarray
    supervised: np.ndarray
    samples: np.ndarray
    dropped: np.ndarray
    rows: int
    size: int
    after: Any
    where: Where
    bad: list[tuple[int, BadRow]] = field(default_factory=list)
    unread: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    absent: frozenset[str] = frozenset()
    images: list[tuple[ImageSource, ...]] = field(default_factory=list)

    def behind(self, row: int) -> "Encoded":
        """Return the samples from this row of the chunk on."""
        first = int(np.searchsorted(self.samples["row"], row))
        token = int(self.samples["length"][:first].sum())
        return replace(
            self,
            tokens=self.tokens[token:],
            supervised=self.supervised[token:],
            samples=self.samples[first:],
            images=self.images[first:],
            dropped=self.dropped[self.dropped[:, 0] >= first] - [first, 0, 0],
        )

    def error(self, number: int, error: BadRow) -> UserError:
        """Return the error of a bad row, with its place."""
        return UserError(self.where.place(number), *error.args)


def refusal(first: UserError, count: int, at_least: bool = False) -> UserError:
    """Return the error that ends a run where `count` rows cannot be used, of which `first` is the first one's."""
    if count == 1:
        return UserError(first.place, first.problem, f"{first.cure}; skip_bad_rows: true leaves it out")
    problem = f"{first.problem} (the first; {count:,} rows{' or more' if at_least else ''} cannot be used)"
    return UserError(first.place, problem, f"{first.cure}; skip_bad_rows: true leaves them out")
