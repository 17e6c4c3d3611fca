"""What an objective has to know of a micro-batch's answers, in addition to the model's inputs."""

import numpy as np
import torch

from ..recipe.objectives import JUDGED
from .store import IGNORED, MicroBatch, TokenSequence

ANSWERS = "answers"  # a key of a micro-batch that is not for the model
SHARED = "shared"  # a key of a sample: how many tokens of the sample before it stand in front of its own
# Its keys. RUNS: int64 (samples,), how many targets each sample has, one sample after the other; WHICH: int64 (answers,), the
# samples that are answers and no filler; TOKENS: int64 (answers,), supervised tokens. Where rows have labels, DESIRABLE: bool
# (answers,), and MISMATCHED: a micro-batch of other answers to the same prompts. Where a reference's log-probabilities are known,
# REFERENCE: fp64 (answers,).
RUNS, WHICH, TOKENS, DESIRABLE, MISMATCHED, REFERENCE = (
    "runs", "which", "tokens", "desirable", "mismatched", "reference"
)  # fmt: skip


def samples_of(sequence: TokenSequence) -> list[TokenSequence]:
    """Return the samples of a sequence, each as a sequence of its own. A filler's tokens are one sample."""
    ends = np.cumsum(sequence["lengths"])[:-1]
    parts = [np.split(sequence[key], ends) for key in ("input_ids", "labels")]
    return [
        {"input_ids": ids, "labels": labels, "lengths": np.array([len(ids)])}
        for ids, labels in zip(*parts, strict=True)
    ]


def prompts_once(samples: list[TokenSequence]) -> list[TokenSequence]:
    """Return the samples of a sequence of PAIRS, with each worse answer cut by the tokens that it has in common with the better
    one before it; SHARED says how many. A filler has one sample.

    The common prefix ends at the first label, and its last token stays with both: it predicts the first label of each.
    """
    laid = list(samples)
    for place in range(1, len(samples), 2):
        pair = samples[place - 1 : place + 1]
        shorter = min(len(sample["labels"]) for sample in pair)
        ids, labels = (np.stack([sample[key][:shorter] for sample in pair]) for key in ("input_ids", "labels"))
        unlike = (ids[0] != ids[1]) | (labels != IGNORED).any(0)
        common = (int(unlike.argmax()) if unlike.any() else shorter) - 1
        if common > 0:
            own = {key: pair[1][key][common:] for key in ("input_ids", "labels")}
            laid[place] = own | {"lengths": pair[1]["lengths"] - common, SHARED: common}
    return laid


def answers_of(
    sequences: list[TokenSequence], samples: list[TokenSequence], batch: MicroBatch, rows: str, scores: bool
) -> MicroBatch:
    """Return what ANSWERS holds of a micro-batch, without MISMATCHED.

    sequences: as they were fetched; samples: theirs, in order; batch: the model's inputs; rows: objectives.PAIRS or JUDGED
    scores: whether each answer has a single target
    """
    tokens = np.array([int((sample["labels"] != IGNORED).sum()) for sample in samples])
    which = np.flatnonzero(tokens)
    if "shift_labels" in batch:
        runs = (tokens > 0).astype(np.int64) if scores else tokens.copy()
        runs[-1] += batch["shift_labels"].numel() - runs.sum()  # a target without a label, where there is no answer
    else:
        runs = np.full(len(samples), batch["labels"].shape[1])
    found = {
        RUNS: torch.from_numpy(runs),
        WHICH: torch.from_numpy(which),
        TOKENS: torch.from_numpy(tokens[which]),
    }
    if rows == JUDGED:
        given = [sequence[DESIRABLE] for sequence in sequences if DESIRABLE in sequence]
        found[DESIRABLE] = torch.from_numpy(np.concatenate([np.zeros(0, bool), *given]))
    given = [sequence[REFERENCE] for sequence in sequences if REFERENCE in sequence]
    if given or not len(which):  # nothing is known of nothing
        found[REFERENCE] = torch.from_numpy(np.concatenate([np.zeros(0), *given]))
    return found


def last_tokens(samples: list[TokenSequence], pad_token_id: int) -> np.ndarray:
    """Return where each answer ends in a micro-batch whose samples lie end to end: int64 (answers,). It is where
    Transformers' classifiers look (modeling_layers.py: GenericForSequenceClassification): the last token that is not padding."""
    begin, places = 0, []
    for sample in samples:
        if (sample["labels"] != IGNORED).any():
            places.append(begin + int(np.flatnonzero(sample["input_ids"] != pad_token_id)[-1]))
        begin += len(sample["input_ids"])
    return np.array(places, dtype=np.int64)


def in_part(runs: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """Return how many targets of each sample lie in a part of the micro-batch: int64 (samples,).

    here: bool (targets,), whether a target lies in this part
    """
    owners = torch.repeat_interleave(torch.arange(len(runs)), runs)
    return torch.bincount(owners[here], minlength=len(runs))
