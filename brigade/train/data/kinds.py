"""What a sample is: an answer, one of a better and a worse answer to a prompt, or an answer that is labelled good or bad.

This is not in preferences.py, because lint reads that without numpy.
"""

from collections.abc import Sequence

import numpy as np

from ...errors.tables import Document, Fields
from ..recipe.objectives import ANSWERS, JUDGED, PAIRS
from . import preferences
from .images import ImageReader
from .keys import Columns
from .preferences import DROP, SAME
from .rows import BadRow
from .samples import Templates, Text, convert

Part = tuple[np.ndarray, np.ndarray]  # token ids, and which of them are supervised
LONGER = "raise max_length, or drop the row"


class Kind:
    """Answers that are learned.

    samples: how many an item has, which a sequence holds together; fewest: items that a held-out split needs
    counts_tokens: whether the loss is the mean over tokens, not over items; mismatched: whether an answer is also compared after
    the prompt of another row; stored: columns of SAMPLE that the store keeps besides those of all kinds; called: items, in words
    """

    samples, fewest = 1, 1
    counts_tokens, mismatched = True, False
    stored: tuple[str, ...] = ()
    called = "samples"

    def texts(
        self, row: object, columns: Columns, templates: Templates, images: ImageReader | None
    ) -> tuple[Text, ...]:
        """Return the texts of a row; none where it says nothing. Raises BadRow."""
        text = convert(row, columns, templates, images)
        return (text,) if text else ()

    def refusal(self, parts: Sequence[Part], max_length: int) -> BadRow | None:
        """Return why the tokens of a row's texts cannot be used; None where they can."""
        return None

    def flaw(self, table: np.ndarray, items: np.ndarray, learned: bool, objective: str) -> tuple[str, str] | None:
        """Return (problem, cure) of a split; None where it can be used.

        table: SAMPLE of all samples; items: numbers of those of the split; learned: whether they are trained on
        """
        return None

    def figures(self, items: np.ndarray) -> Fields:
        """Return what the facts of prepared data say of this kind only. items: SAMPLE, of shape (items, samples)"""
        return {}

    def words(self, facts: Document) -> list[str]:
        """Return the figures in words."""
        return []

    def headings(self, sequence: Document) -> list[str]:
        """Return what stands above each sample of the first item of a TokenSequence."""
        return ["one sample"]


class Pairs(Kind):
    """Pairs of a better and a worse answer, which follow each other."""

    samples = 2
    counts_tokens = False
    called = "pairs"
    rows = PAIRS
    sides = ("better", "worse")

    def texts(
        self, row: object, columns: Columns, templates: Templates, images: ImageReader | None
    ) -> tuple[Text, ...]:
        return preferences.convert(row, columns, templates, self.rows)

    def refusal(self, parts: Sequence[Part], max_length: int) -> BadRow | None:
        names = ("chosen answer", "rejected answer") if len(parts) == 2 else ("answer",)
        for name, (_, mask) in zip(names, parts, strict=True):
            if mask[1:max_length].any():  # nothing comes before the first token that could predict it
                continue
            if not mask.any():
                return BadRow(f"no token of the {name} is learned", DROP)
            return BadRow(f"nothing of the {name} is left within max_length ({max_length:,} tokens)", LONGER)
        if len(parts) == 2:
            (better, _), (worse, _) = parts
            if np.array_equal(better, worse):
                return BadRow(SAME, DROP)
            if np.array_equal(better[:max_length], worse[:max_length]):
                return BadRow(f"chosen and rejected are the same within max_length ({max_length:,} tokens)", LONGER)
        return None

    def figures(self, items: np.ndarray) -> Fields:
        """Return how many answers and supervised tokens are better and worse ones, and how many pairs have prompts of unlike
        lengths."""
        sides = {"better": items[items["desirable"] == 1], "worse": items[items["desirable"] == 0]}
        return {
            **{
                name: {"answers": len(side), "supervised": int(side["supervised"].sum())}
                for name, side in sides.items()
            },
            "unlike": int((items["prompt"] != items["prompt"][:, :1]).any(axis=1).sum()),
        }

    def words(self, facts: Document) -> list[str]:
        """Return how long both kinds of answers are, in words: a model learns lengths, too."""
        lengths = [
            f"{side['supervised'] / max(side['answers'], 1):,.0f} tokens in {name} answers"
            for name, side in zip(self.sides, (facts["better"], facts["worse"]), strict=True)
        ]
        return [f"on average {' and '.join(lengths)}"]

    def headings(self, sequence: Document) -> list[str]:
        return ["one pair, the better answer", "the worse answer"]


class Judged(Pairs):
    """Answers that are labelled good or bad; a row that has a pair holds one of each."""

    samples, fewest = 1, 2
    mismatched = True
    stored = ("desirable",)
    called = "judged answers"
    rows = JUDGED
    sides = ("good", "bad")

    def flaw(self, table: np.ndarray, items: np.ndarray, learned: bool, objective: str) -> tuple[str, str] | None:
        """Answers that are learned from need both labels, and each prompt also needs another row's answer."""
        labels = table["desirable"][items]
        if learned and (labels.all() or not labels.any()):
            label, other = ("good", "bad") if labels.all() else ("bad", "good")
            problem = f"all {len(items):,} answers that are trained on are labelled {label}, and there is none that is {other}"
            return problem, f"add answers that are {other}: {objective} learns from both"
        if len(np.unique(table["row"][items])) < 2:
            problem = f"objective {objective} compares with answers of other rows, and there is one row"
            return (
                problem,
                "train on at least two rows, and hold out two: raise validation_split, or give a validation_file",
            )
        return None

    def words(self, facts: Document) -> list[str]:
        """Return how many answers are good and bad, and how long both kinds are, in words."""
        sides = zip(self.sides, (facts["better"], facts["worse"]), strict=True)
        return [" and ".join(f"{side['answers']:,} {name}" for name, side in sides), *super().words(facts)]

    def headings(self, sequence: Document) -> list[str]:
        return [f"one sample, judged {self.sides[0 if sequence['desirable'][0] else 1]}"]


KINDS: dict[str, Kind] = {ANSWERS: Kind(), PAIRS: Pairs(), JUDGED: Judged()}
