"""Best-fit packing: every sample once, no overflow, near the optimum, and the same bins on every host."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.data import packing


def as_lists(sequences):
    return [part.tolist() for part in np.split(sequences.samples, np.cumsum(sequences.sizes)[:-1])][: len(sequences)]


def best_fit(lengths, capacity):
    return as_lists(packing.best_fit(np.array(lengths, dtype=np.int64), capacity))


def naive(lengths, capacity):
    """Best-fit decreasing as the textbook writes it: the room that is left in each bin, sorted."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


def optimum(lengths, capacity):
    """The fewest bins, by trying all ways."""

    def fits(bins, rest):
        if not rest:
            return True
        options = {room: i for i, room in enumerate(bins) if room >= rest[0]}
        return any(fits((*bins[:i], room - rest[0], *bins[i + 1 :]), rest[1:]) for room, i in options.items())

    ordered = tuple(sorted(lengths, reverse=True))
    return next(n for n in range(len(lengths) + 1) if fits((capacity,) * n, ordered))


@st.composite
def bins(draw, most=200):
    capacity = draw(st.integers(1, 100))
    return draw(st.lists(st.integers(1, capacity), max_size=most)), capacity


@given(bins())
def test_each_sample_is_in_one_sequence_and_none_overflows(drawn):
    lengths, capacity = drawn
    sequences = best_fit(lengths, capacity)
    assert sorted(itertools.chain(*sequences)) == list(range(len(lengths)))
    assert all(sequence == sorted(sequence) and sequence for sequence in sequences)
    used = [sum(lengths[i] for i in sequence) for sequence in sequences]
    assert all(total <= capacity for total in used)
    assert sorted(capacity - total for total in used) == naive(lengths, capacity)
    # Two sequences that would fit into one are never both there.
    assert sum(2 * total <= capacity for total in used) <= 1
    assert best_fit(lengths, capacity) == sequences


@given(bins(most=8))
def test_the_bound_of_best_fit_decreasing(drawn):
    lengths, capacity = drawn
    # 11/9 OPT + 6/9 (Johnson 1974, Dosa 2007)
    assert 9 * len(best_fit(lengths, capacity)) <= 11 * optimum(lengths, capacity) + 6


@pytest.mark.parametrize("lengths", [[0], [9], [3, -1], [8, 9]])
def test_lengths_that_fit_nowhere(lengths):
    with pytest.raises(ValueError, match="8"):
        best_fit(lengths, 8)


def test_the_packing_is_pinned():
    # A resumed run goes on in the middle of an epoch: no release may pack the same samples otherwise.
    assert best_fit([4, 8, 1, 4, 2, 1, 3, 8, 5], 10) == [[1, 5], [4, 7], [0, 2, 8], [3, 6]]


@pytest.mark.parametrize("mean, spread", [(5, 1), (6, 0.8), (4, 1.3)])
def test_efficiency_on_the_lengths_of_chats(mean, spread):
    capacity = 2048
    lengths = np.random.default_rng(0).lognormal(mean, spread, 4000).astype(np.int64).clip(2, capacity)
    assert lengths.sum() / (len(best_fit(lengths, capacity)) * capacity) > 0.97


def test_a_sample_takes_some_numbers_of_an_array_and_no_list_of_its_own():
    lengths = np.random.default_rng(0).integers(900, 1000, 100_000)  # each alone in its sequence: the most sequences
    tracemalloc.start()
    sequences = packing.best_fit(lengths, 1024)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sequences) == len(lengths)
    assert kept < 20 * len(lengths)
    assert most < 120 * len(lengths)


@given(bins(), st.randoms(use_true_random=False))
def test_sequences_in_another_order_keep_their_samples(drawn, chance):
    lengths, capacity = drawn
    sequences = packing.best_fit(np.array(lengths, dtype=np.int64), capacity)
    order = np.array(chance.sample(range(len(sequences)), len(sequences)), dtype=np.int64)
    before = best_fit(lengths, capacity)
    assert as_lists(sequences.in_order(order)) == [before[number] for number in order]
