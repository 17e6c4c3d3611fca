"""From rows to a model's inputs: end to end without padding, or padded; samples of a row never see each other.

Attention is told where samples begin in each way that an implementation of Transformers reads: position ids that start
again (eager, SDPA, flex) and cumulative lengths (flash, varlen). That needs an absent attention mask and no cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .store import IGNORED, Row

FILLER = -1  # the index of a row of two unsupervised tokens, which fills up an epoch's last step


@dataclass(frozen=True)
class About:
    """What a micro-batch holds, filler and padding aside; slots: its tokens with them.

    row: tokens of one of its rows; logits: for how many of its slots they are computed
    step_supervised: supervised tokens of the whole optimizer step over all ranks (None: not known)
    end_to_end: whether a row has several samples, of which padding is one (None: padding has a mask)
    """

    tokens: int
    squared_lengths: int
    supervised: int
    slots: int
    step_supervised: int | None
    end_to_end: bool | None = None
    row: int = 0
    logits: int = 0


ABOUT = "about"  # the key of a micro-batch that is not for the model


class WithFiller(torch.utils.data.Dataset):
    """Rows, among them FILLER; fetched a micro-batch at a time, with what their Indices know of the whole step."""

    def __init__(self, rows: Sequence[Row], pad_token_id: int) -> None:
        self.rows = rows
        self.filler: Row = {
            "input_ids": np.full(2, pad_token_id, dtype=np.int32),
            "labels": np.full(2, IGNORED, dtype=np.int64),
            "lengths": np.array([2]),
        }

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Row:
        return self.filler if index == FILLER else self.rows[index]

    def __getitems__(self, indices: Any) -> tuple[list[Row], int | None]:
        supervised = getattr(indices, "supervised", None)
        if supervised is None and getattr(indices, "rows", None):
            supervised = self.rows.step_supervised(indices.rows)  # type: ignore[attr-defined]
        return [self[index] for index in indices], supervised


class Collate:
    """Micro-batches as a model's inputs, with ABOUT.

    padding_free: rows end to end, tensors of shape (1, tokens); logits are computed where a label follows, and nowhere
        else (logits_to_keep, shift_labels). Else (rows, longest), padded on the right.
    squares: attention computes the products between the samples of a row too, and hides them; then a micro-batch is padded
        where wasteful() says so
    packed: rows may hold several samples; cumulative: attention wants their begins as cumulative lengths
    multiple: pad the tokens up to a multiple of it (fixed shapes to compile for)
    """

    def __init__(
        self,
        pad_token_id: int,
        padding_free: bool,
        packed: bool,
        cumulative: bool,
        multiple: int = 1,
        squares: bool = False,
    ) -> None:
        # Where attention reads cumulative lengths it reads no position ids, and takes them for a single row alone.
        self.pad_token_id, self.packed = pad_token_id, packed
        self.padding_free = padding_free or (packed and cumulative)
        self.cumulative, self.multiple, self.squares = cumulative, multiple, squares

    def __call__(self, fetched: tuple[list[Row], int | None]) -> dict[str, Any]:
        rows, step_supervised = fetched
        padded = self.squares and wasteful([len(row["input_ids"]) for row in rows])
        batch = self._flat(rows) if self.padding_free and not padded else self._padded(rows)
        slots = batch["input_ids"].numel()
        real = [row for row in rows if (row["labels"] != IGNORED).any()]
        batch[ABOUT] = About(
            tokens=sum(len(row["input_ids"]) for row in real),
            squared_lengths=sum(int((row["lengths"] ** 2).sum()) for row in real),
            supervised=sum(int((row["labels"] != IGNORED).sum()) for row in real),
            slots=slots,
            step_supervised=step_supervised,
            end_to_end=None if "attention_mask" in batch else bool((batch["position_ids"][:, 1:] == 0).any()),
            row=batch["input_ids"].shape[1],
            logits=len(batch["logits_to_keep"]) if "logits_to_keep" in batch else slots,
        )
        return batch

    def _flat(self, rows: list[Row]) -> dict[str, Any]:
        ids, labels, lengths = (
            np.concatenate([row[key] for row in rows]) for key in ("input_ids", "labels", "lengths")
        )
        missing = -len(ids) % self.multiple
        if missing:
            ids = np.append(ids, np.full(missing, self.pad_token_id, dtype=ids.dtype))
            labels = np.append(labels, np.full(missing, IGNORED))
            lengths = np.append(lengths, missing)
        kept = np.flatnonzero(labels[1:] != IGNORED)
        targets = labels[1:][kept]
        if not len(kept):  # filler alone: one logit without a label keeps every parameter in the graph
            kept, targets = np.zeros(1, dtype=np.int64), np.full(1, IGNORED)
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(positions(lengths))[None],
            "logits_to_keep": torch.from_numpy(kept),
            "shift_labels": torch.from_numpy(targets)[None],
            **(cumulative(lengths) if self.cumulative else {}),
        }

    def _padded(self, rows: list[Row]) -> dict[str, Any]:
        longest = max(len(row["input_ids"]) for row in rows)
        longest += -longest % self.multiple
        shape = (len(rows), longest)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "labels": torch.full(shape, IGNORED),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
        }
        for number, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][number, :length] = torch.from_numpy(row["input_ids"])
            batch["labels"][number, :length] = torch.from_numpy(row["labels"])
            batch["attention_mask"][number, :length] = 1
        if self.packed:  # padding is one more sample of its row
            del batch["attention_mask"]
            lengths = [np.append(row["lengths"], longest - len(row["input_ids"])) for row in rows]
            batch["position_ids"] = torch.from_numpy(np.stack([positions(each) for each in lengths]))
        return batch


def wasteful(lengths: Sequence[int]) -> bool:
    """Whether rows of these lengths cost attention twice the products end to end that they cost padded: there a row of all of
    them, squared, here as often the longest one's square. Below that the fewer tokens make up for
    it, as tiny models of gpt-oss and Llama showed on a CPU."""
    return sum(lengths) ** 2 > 2 * len(lengths) * max(lengths) ** 2


def positions(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ..., starting again with each sample; int64 (tokens,)."""
    begins = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(begins, lengths)


def cumulative(lengths: np.ndarray) -> dict[str, Any]:
    """The names under which flash attention's variable-length kernels take where samples begin."""
    ends = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
