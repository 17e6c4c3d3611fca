"""A model's inputs from sequences: end to end without padding, or padded; samples of one sequence never see each other.

Attention learns where samples begin in each way that an implementation of Transformers reads: from position ids that start
again (eager, SDPA, flex) and from cumulative lengths (flash, varlen). Neither works with an attention mask or a cache.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...errors import UserError
from ..recipe import objectives
from .answers import ANSWERS, MISMATCHED, SHARED, answers_of, last_tokens, prompts_once, samples_of
from .store import IGNORED, MicroBatch, TokenSequence

Inputs = Mapping[str, Any]  # likewise, of who only reads it
FILLER = -1  # the index of a sequence of two unsupervised tokens, which fills up an epoch's last step


@dataclass(frozen=True)
class About:
    """What a micro-batch holds, without filler and padding.

    tokens, squared_lengths, slots: of samples, each with its whole prompt, also where two share it
    slots: its tokens, filler and padding included; length: tokens of each of its sequences as they are computed, with both
    logits: the number of slots for which they are computed
    step_supervised: supervised tokens of the whole optimizer step over all ranks, each times its weight (None: not known)
    end_to_end: whether a sequence has several samples, padding being one of them (None: padding has a mask)
    """

    tokens: int
    squared_lengths: int
    supervised: int
    slots: int
    step_supervised: float | None
    end_to_end: bool | None = None
    length: int = 0
    logits: int = 0


# Keys of a micro-batch that are not for the model.
ABOUT, REAL, WEIGHTS, TEACHER = "about", "real", "token_weights", "teacher"
# What a model's head and loss read alone.
OF_THE_HEAD = ("labels", "shift_labels", "logits_to_keep", "num_items_in_batch")
# Where samples begin, as flash attention's variable-length kernels take it: among the queries, and among the keys that they see.
# And where some see keys of the sample before theirs, too: of each key that is seen, the place of its token.
BORDERS, KEYS, KEY_PLACES = "cu_seq_lens_q", "cu_seq_lens_k", "key_places"


class WithFiller(torch.utils.data.Dataset):
    """Sequences, and FILLER among them; fetched a micro-batch at a time, with what their Indices know of the whole step."""

    def __init__(self, sequences: Sequence[TokenSequence], pad_token_id: int) -> None:
        self.sequences = sequences
        self.filler: TokenSequence = {
            "input_ids": np.full(2, pad_token_id, dtype=np.int32),
            "labels": np.full(2, IGNORED, dtype=np.int64),
            "lengths": np.array([2]),
        }

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> TokenSequence:
        return self.filler if index == FILLER else self.sequences[index]

    def __getitems__(self, indices: Iterable[int]) -> tuple[list[TokenSequence], float | None] | UserError:
        """Return them, or the UserError that reading them has raised, for CarriesErrors."""
        supervised = getattr(indices, "supervised", None)
        try:
            if supervised is None and getattr(indices, "sequences", None):
                supervised = self.sequences.step_supervised(indices.sequences)  # type: ignore[attr-defined]
            return [self[index] for index in indices], supervised
        except UserError as error:
            return error


@dataclass(frozen=True)
class Layout:
    """How samples lie in a micro-batch.

    padding_free: sequences lie end to end, in tensors of shape (1, tokens), and logits are computed only where a label follows
        (logits_to_keep, shift_labels); else tensors are (sequences, longest), padded on the right
    packed: sequences may hold several samples; cumulative: attention wants to know where they begin as cumulative lengths
    multiple: tokens are padded up to a multiple of it
    squares: attention also computes products between the samples of a sequence, and hides them; then a micro-batch is padded
        where wasteful() says so
    marks: whether REAL says which tokens are neither filler nor padding, in a tensor of bool of the shape of input_ids
    rows: what a row of the data holds (objectives.py). Where samples are answers that are compared, each is padded by itself, and
        ANSWERS tells of them
    scores: whether the model is asked for a score at each answer's last token, and not for the token after each one
    processor: the model's processor of images (model/images/processor.py), which adds to a micro-batch what forward() takes of
        images; None where rows have none
    always_image: whether a micro-batch without an image gets a blank one, in a sample without labels at its end: where one rank
        runs the tower that turns images into embeddings, all ranks have to
    targets: at how many places logits are computed at least, end to end; the further ones are without a label
    shares: whether the two answers of a pair, end to end, share the tokens of their prompt: the second follows the first
        without them (arXiv 2410.20305). Its positions go on after the prompt, and its attention sees the prompt and itself
    """

    padding_free: bool = False
    packed: bool = False
    cumulative: bool = False
    multiple: int = 1
    squares: bool = False
    marks: bool = False
    rows: str = objectives.ANSWERS
    scores: bool = False
    processor: Any = None
    always_image: bool = False
    targets: int = 1  # which keeps every parameter in the graph where there is only filler
    shares: bool = False

    @property
    def end_to_end(self) -> bool:
        """Whether sequences lie end to end: attention that reads cumulative lengths reads no position ids, and takes a single
        sequence only."""
        return self.padding_free or (self.packed and self.cumulative)

    @property
    def compares(self) -> bool:
        """Whether samples are answers that are compared."""
        return self.rows != objectives.ANSWERS


class Collate:
    """Micro-batches as a model's inputs, with ABOUT."""

    def __init__(self, pad_token_id: int, layout: Layout) -> None:
        self.pad_token_id, self.layout = pad_token_id, layout

    def __call__(self, fetched: tuple[list[TokenSequence], float | None]) -> MicroBatch:
        fetched_sequences, step_supervised = fetched
        sequences, how = fetched_sequences, self.layout
        if how.compares:
            sequences = [sample for sequence in sequences for sample in samples_of(sequence)]
        if how.always_image and how.processor is not None and not any(sequence.get("images") for sequence in sequences):
            sequences = [*sequences, how.processor.blank()]
        padded = how.squares and wasteful([len(sequence["input_ids"]) for sequence in sequences])
        if how.shares and not padded:
            sequences = [sample for sequence in fetched_sequences for sample in prompts_once(samples_of(sequence))]
        batch = self._flat(sequences) if how.end_to_end and not padded else self._padded(sequences)
        if any((sequence["weights"] != 1).any() for sequence in sequences if "weights" in sequence):
            batch[WEIGHTS] = _weights(sequences, batch)
        told = [sequence[TEACHER] for sequence in sequences if TEACHER in sequence]
        if told:
            batch[TEACHER] = torch.from_numpy(np.concatenate(told))
        if how.marks:
            batch[REAL] = _real(sequences, batch["input_ids"])
        if how.compares:
            batch[ANSWERS] = answers_of(fetched_sequences, sequences, batch, how.rows, how.scores)
        computed, shared = batch["input_ids"].numel(), [sequence.get(SHARED, 0) for sequence in sequences]
        real = [sequence for sequence in sequences if (sequence["labels"] != IGNORED).any()]
        batch[ABOUT] = About(
            tokens=sum(len(sequence["input_ids"]) + sequence.get(SHARED, 0) for sequence in real),
            squared_lengths=sum(int(((sequence["lengths"] + sequence.get(SHARED, 0)) ** 2).sum()) for sequence in real),
            supervised=sum(int((sequence["labels"] != IGNORED).sum()) for sequence in real),
            slots=computed + sum(shared),
            step_supervised=step_supervised,
            end_to_end=None if "attention_mask" in batch else bool((batch["position_ids"].diff() != 1).any()),
            length=batch["input_ids"].shape[1],
            logits=len(batch["logits_to_keep"]) if "logits_to_keep" in batch else computed,
        )
        if how.rows == objectives.JUDGED:  # a filler's answer to another prompt is the filler itself
            others: list[Any] = [sequence.get(MISMATCHED, sequence) for sequence in fetched_sequences]
            unlabelled = copy.copy(self)  # of its kind: where sequences are divided, these are too
            unlabelled.layout = replace(how, rows=objectives.PAIRS)
            batch[ANSWERS][MISMATCHED] = unlabelled((others, None))
        if how.processor is not None:
            how.processor.add_to(batch, sequences)
        return batch

    def _flat(self, sequences: list[TokenSequence]) -> MicroBatch:
        ids, labels, lengths = (
            np.concatenate([sequence[key] for sequence in sequences]) for key in ("input_ids", "labels", "lengths")
        )
        before = np.concatenate([np.full(len(each["lengths"]), each.get(SHARED, 0)) for each in sequences])
        missing = -len(ids) % self.layout.multiple
        if missing:
            ids = np.append(ids, np.full(missing, self.pad_token_id, dtype=ids.dtype))
            labels = np.append(labels, np.full(missing, IGNORED))
            lengths, before = np.append(lengths, missing), np.append(before, 0)
        kept = np.flatnonzero(labels[1:] != IGNORED)
        targets = labels[1:][kept]
        if self.layout.scores:
            kept = last_tokens(sequences, self.pad_token_id)
            targets = np.zeros_like(kept)
        more = (0, max(0, self.layout.targets - len(kept)))
        kept, targets = np.pad(kept, more), np.pad(targets, more, constant_values=IGNORED)
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(positions(lengths, before))[None],
            "logits_to_keep": torch.from_numpy(kept),
            "shift_labels": torch.from_numpy(targets)[None],
            **(cumulative(lengths, before) if self.layout.cumulative else {}),
        }

    def _padded(self, sequences: list[TokenSequence]) -> MicroBatch:
        lengths = [len(sequence["input_ids"]) for sequence in sequences]
        longest = max(lengths) + -max(lengths) % self.layout.multiple
        shape = (len(sequences), longest)
        batch = {
            "input_ids": _laid_out([sequence["input_ids"] for sequence in sequences], shape, self.pad_token_id),
            "labels": _laid_out([sequence["labels"] for sequence in sequences], shape, IGNORED),
            "attention_mask": _laid_out([np.ones(length, np.int64) for length in lengths], shape, 0),
        }
        if self.layout.packed and not self.layout.compares:  # then padding is one more sample of its sequence
            del batch["attention_mask"]
            own = [np.append(sequence["lengths"], longest - len(sequence["input_ids"])) for sequence in sequences]
            batch["position_ids"] = torch.from_numpy(np.stack([positions(each) for each in own]))
        return batch


def _laid_out(values: list[np.ndarray], shape: Sequence[int], behind: float) -> torch.Tensor:
    """Return values of the tokens of sequences as these lie in a micro-batch of this shape: end to end, or one in each row.

    values: of each sequence's tokens; behind: of padding, whose type the tensor takes
    """
    found = torch.full(tuple(shape), behind)
    rows = [np.concatenate(values)] if len(found) == 1 else values
    for row, own in zip(found, rows, strict=True):
        row[: len(own)] = torch.from_numpy(own)
    return found


def _real(sequences: list[TokenSequence], ids: torch.Tensor) -> torch.Tensor:
    """Which tokens of a micro-batch of this shape belong to sequences with labels, which lie end to end or one in each row."""
    marks = [np.full(len(labels), bool((labels != IGNORED).any())) for labels in (each["labels"] for each in sequences)]
    return _laid_out(marks, ids.shape, False)


def _weights(sequences: list[TokenSequence], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight of each target of a micro-batch, 1 where there is padding or filler.

    fp32, of the shape of shift_labels, or of labels where there are none: as a sample's first token is no target, a target and
    the token before it weigh the same.
    """
    own = [
        np.repeat(sequence.get("weights", np.ones(len(sequence["lengths"]))), sequence["lengths"]).astype(np.float32)
        for sequence in sequences
    ]
    found = _laid_out(own, batch["labels"].shape, 1.0)
    return found[:, batch["logits_to_keep"]] if "logits_to_keep" in batch else found


class CarriesErrors:
    """What collates in a Loader: a user's mistake is handed on instead of its micro-batch, and raised by whoever draws it.

    A process that reads ahead is no part of the run: torch would raise a RuntimeError around the text of its traceback.
    """

    def __init__(self, collate: "Collate") -> None:
        self.collate = collate

    def __call__(self, fetched: tuple[list[TokenSequence], float | None] | UserError) -> MicroBatch | UserError:
        try:
            return fetched if isinstance(fetched, UserError) else self.collate(fetched)
        except UserError as error:
            return error


def drawn(micro_batch: Inputs | UserError) -> Inputs:
    """Return a micro-batch of a Loader. Raises the UserError that stands in its place."""
    if isinstance(micro_batch, UserError):
        raise micro_batch
    return micro_batch


def on_device(micro_batch: Inputs, device: torch.device) -> MicroBatch:
    """Return the micro-batch with its tensors on the device; the host does not wait for copies from pinned memory.

    Micro-batches within it move, too. Tensors that tell where samples begin remember the ones on the host: see on_host(). Raises
    what drawn() raises.
    """
    moved = {}
    for key, each in drawn(micro_batch).items():
        moved[key] = each.to(device, non_blocking=True) if isinstance(each, torch.Tensor) else each
        if isinstance(each, Mapping):
            moved[key] = on_device(each, device)
    for key in (BORDERS, KEYS, "position_ids"):
        if key in moved and moved[key] is not micro_batch[key]:
            moved[key].on_host = micro_batch[key]
    return moved


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that tells where samples begin: those that on_device() had, else a copy, for which the host
    waits."""
    return getattr(tensor, "on_host", tensor).cpu()


def wasteful(lengths: Sequence[int]) -> bool:
    """Whether sequences of these lengths cost attention more than twice as many products end to end as padded.

    End to end they are the square of the sum, padded the longest one's square for each. Below twice as many, having fewer tokens
    makes up for it, as tiny models of gpt-oss and Llama showed on a CPU.
    """
    return sum(lengths) ** 2 > 2 * len(lengths) * max(lengths) ** 2


def positions(lengths: np.ndarray, before: np.ndarray | int = 0) -> np.ndarray:
    """Return position ids, 0, 1, ..., that start again with each sample; int64 (tokens,).

    before: for each sample, how many tokens of the one before it also stand in front of it: its positions begin with that
    """
    begins = np.cumsum(lengths) - lengths - before
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(begins, lengths)


def cumulative(lengths: np.ndarray, before: np.ndarray | int = 0) -> MicroBatch:
    """Return where samples begin, under the names by which flash attention's variable-length kernels take it. before: as of
    positions(): a sample has so many more keys than queries, and KEY_PLACES says which"""
    ends, of_keys = (torch.from_numpy(np.cumsum([0, *each]).astype(np.int32)) for each in (lengths, lengths + before))
    longest = {"max_length_q": int(lengths.max()), "max_length_k": int((lengths + before).max())}
    places = {KEY_PLACES: torch.from_numpy(key_places(lengths, before))} if np.any(before) else {}
    return {BORDERS: ends, KEYS: of_keys, **longest, **places}


def key_places(lengths: np.ndarray, before: np.ndarray | int) -> np.ndarray:
    """Return the places of the tokens that samples see, one sample after the other; int64 (keys,). before: as of positions()"""
    begins, keys = np.cumsum(lengths) - lengths, lengths + before
    within = positions(keys)
    of_shared, of_own = (np.repeat(first, keys) for first in (np.roll(begins, 1), begins - before))
    return within + np.where(within < np.repeat(keys - lengths, keys), of_shared, of_own)
