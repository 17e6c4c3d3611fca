"""Best-fit packing of samples into sequences of max_length tokens, with little room left (arXiv 2404.10830)."""

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return sequences as lists of sample indices: each sample is in exactly one, and none is longer than `capacity` tokens.

    Best-fit decreasing: from the longest sample to the shortest, each goes where it leaves the least room. Indices
    within a sequence are ascending. Takes O(n capacity / 64) time.

    lengths: tokens of each sample, 1 to capacity; raises ValueError for others
    """
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit into {capacity}")
    sequences: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by the tokens that still fit into them
    rooms = 0  # bit r is set where with_room[r] is not empty
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the least room that suffices
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(sample)
        left = room - length
        if left:
            with_room[left].append(sequence)
            rooms |= 1 << left
    return [sorted(sequence) for sequence in sequences]
