"""Which samples make up a sequence; and best-fit packing of them, with little room left (arXiv 2404.10830)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sequences:
    """The samples of each sequence, in arrays: a list for each of millions would take a multiple of the memory.

    samples: their numbers, sequence after sequence, int64; sizes: how many each sequence has, int64
    """

    samples: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of_single(cls, samples: np.ndarray) -> "Sequences":
        """Return sequences of one sample each."""
        return cls(samples, np.ones(len(samples), np.int64))

    def in_order(self, order: np.ndarray) -> "Sequences":
        """Return these sequences in another order, or some of them. order: their numbers"""
        sizes = self.sizes[order]
        shift = (np.cumsum(self.sizes) - self.sizes)[order] - (np.cumsum(sizes) - sizes)  # of each sequence's samples
        return Sequences(self.samples[np.repeat(shift, sizes) + np.arange(sizes.sum())], sizes)

    def of_items(self, size: int) -> "Sequences":
        """Return the sequences of samples that these sequences of items are, where an item is so many samples in a row."""
        return Sequences((self.samples[:, None] * size + np.arange(size)).ravel(), self.sizes * size)


def best_fit(lengths: np.ndarray, capacity: int) -> Sequences:
    """Return sequences of sample indices: each sample is in exactly one, and none is longer than `capacity` tokens.

    Best-fit decreasing: from the longest sample to the shortest, each goes where it leaves the least room. Indices
    within a sequence are ascending. Takes O(n capacity / 64) time.

    lengths: tokens of each sample, 1 to capacity; raises ValueError for others
    """
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit into {capacity}")
    count = 0
    sequence_of = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by the tokens that still fit into them
    rooms = 0  # bit r is set where with_room[r] is not empty
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].astype(np.int64)
    for number, length in enumerate(longest_first.data):  # whose items are Python's own integers
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the least room that suffices
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence, count = capacity, count, count + 1
        sequence_of[number] = sequence
        left = room - length
        if left:
            with_room[left].append(sequence)
            rooms |= 1 << left
    return Sequences(order[np.lexsort((order, sequence_of))], np.bincount(sequence_of, minlength=count))
