"""Every sample once per epoch, and the same samples in every optimizer step, at any world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.data.collate import ABOUT, FILLER, Collate, Layout, WithFiller
from brigade.train.data.sampling import GlobalBatches, Loader
from brigade.train.data.store import IGNORED

sizes = st.integers(1, 6)
samples = st.integers(0, 200)
seeds = st.none() | st.integers(0, 2**32)


def ranks_of(n, micro, accumulation, world, seed, epoch=0):
    """The micro-batches of all ranks: a list per rank. They are as many on each, else collectives hang at the epoch's end."""
    every = []
    for rank in range(world):
        batches = GlobalBatches(n, micro, accumulation, rank, world, seed)
        batches.set_epoch(epoch)
        every.append(list(batches))
        assert len(batches) == len(every[-1]) == len(every[0]) == batches.steps * accumulation
        assert {len(micro_batch) for micro_batch in every[-1]} <= {micro}
    return every


def step_sets(n, micro, accumulation, world, seed, epoch=0):
    """The samples of each optimizer step over all ranks, sorted; filler included."""
    every = ranks_of(n, micro, accumulation, world, seed, epoch)
    steps = len(every[0]) // accumulation
    return [
        sorted(
            sample
            for rank in every
            for micro_batch in rank[step * accumulation : (step + 1) * accumulation]
            for sample in micro_batch
        )
        for step in range(steps)
    ]


@given(samples, sizes, sizes, sizes, seeds, st.integers(0, 3))
def test_every_sample_exactly_once_and_filler_only_in_the_last_step(n, micro, accumulation, world, seed, epoch):
    steps = step_sets(n, micro, accumulation, world, seed, epoch)
    seen = [sample for step in steps for sample in step if sample != FILLER]
    assert sorted(seen) == list(range(n))
    assert all(FILLER not in step for step in steps[:-1])
    assert all(len(step) == micro * accumulation * world for step in steps)
    assert not steps or set(steps[-1]) != {FILLER}, "a step of filler alone would divide by no tokens"


@given(st.data(), samples, seeds, st.integers(0, 3))
def test_steps_are_the_same_for_any_way_to_make_up_the_global_batch(data, n, seed, epoch):
    micro, accumulation, world = data.draw(st.tuples(sizes, sizes, sizes))
    alone = step_sets(n, micro * accumulation * world, 1, 1, seed, epoch)
    assert step_sets(n, micro, accumulation, world, seed, epoch) == alone
    assert step_sets(n, world, micro, accumulation, seed, epoch) == alone


@given(st.integers(50, 200), sizes, sizes, st.integers(0, 2**32), st.integers(0, 5))
def test_order_depends_on_seed_and_epoch(n, micro, world, seed, epoch):
    def flat(seed, epoch):
        return ranks_of(n, micro, 2, world, seed, epoch)

    assert flat(seed, epoch) == flat(seed, epoch)
    assert flat(seed, epoch) != flat(seed, epoch + 1)
    assert flat(seed, epoch) != flat(seed + 1, epoch)


@given(st.data(), samples, seeds, st.integers(0, 3))
def test_a_global_batch_that_does_not_divide_is_filled_up_in_its_last_micro_step(data, n, seed, epoch):
    micro, world, size = data.draw(st.tuples(sizes, sizes, st.integers(1, 40)))
    accumulation = -(-size // (micro * world))
    ranks = [GlobalBatches(n, micro, accumulation, rank, world, seed, global_size=size) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    every, alone = [list(rank) for rank in ranks], step_sets(n, size, 1, 1, seed, epoch)
    assert {len(rank) for rank in every} == {len(alone) * accumulation}
    for number, whole in enumerate(alone):
        step = [batch for rank in every for batch in rank[number * accumulation : (number + 1) * accumulation]]
        assert sorted(s for batch in step for s in batch if s != FILLER) == [s for s in whole if s != FILLER]
        if FILLER not in whole:  # of all but an epoch's last step
            before = [
                batch for rank in every for batch in rank[number * accumulation : (number + 1) * accumulation - 1]
            ]
            assert all(FILLER not in batch for batch in before)


def test_order_does_not_touch_the_global_random_state():
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    list(GlobalBatches(100, 2, 2, 0, 2, seed=7))
    assert (np.random.get_state()[1] == before).all()


def test_order_is_pinned():
    # Recorded with numpy 2: a checkpoint resumes in the middle of an epoch, so no release may change the order.
    assert list(GlobalBatches(7, 2, 1, 0, 2, seed=42)) == [[3, 2], [1, 5]]


def test_without_a_seed_a_step_on_two_ranks_is_in_the_files_order():
    # Rank after rank within a micro-step: 8 samples of a step = 2 accumulation x 2 ranks x 2.
    assert ranks_of(7, 2, 2, 2, None) == [[[0, 1], [4, 5]], [[2, 3], [6, FILLER]]]


# ---- loading -----------------------------------------------------------------------------------------------------
def dataset(n):
    """Sample i holds the tokens i + 10, as many as make collating uneven."""
    return [row([i + 10] * (1 + i % 4), [IGNORED] * (i % 4) + [i + 10]) for i in range(n)]


def row(tokens, labels):
    return {
        "input_ids": np.array(tokens, dtype=np.int32),
        "labels": np.array(labels, dtype=np.int64),
        "lengths": np.array([len(tokens)]),
    }


PADDED = Collate(0, Layout(padding_free=False, packed=False, cumulative=False))


def loader(n, micro=2, accumulation=2, rank=0, world=2, seed=5):
    supervised = np.ones(n, dtype=np.int64)
    batches = GlobalBatches(n, micro, accumulation, rank, world, seed, supervised)
    return Loader(WithFiller(dataset(n), 0), batches, PADDED, workers=0)


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


@given(st.integers(9, 60), sizes, sizes, st.integers(1, 3), st.data())
def test_skipping_batches_is_resuming(n, micro, accumulation, world, data):
    # As Trainer._run_epoch does: skip first, then set the epoch on what skip_first_batches wrapped.
    from accelerate import skip_first_batches

    rank, epoch = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, 3))
    whole = loader(n, micro, accumulation, rank, world)
    whole.set_epoch(epoch)
    expected = ids(whole)
    k = data.draw(st.integers(1, len(expected)))
    resumed = skip_first_batches(loader(n, micro, accumulation, rank, world), k)
    assert hasattr(resumed, "set_epoch") or hasattr(resumed.batch_sampler.batch_sampler, "set_epoch")
    (resumed if hasattr(resumed, "set_epoch") else resumed.batch_sampler.batch_sampler).set_epoch(epoch)
    assert ids(resumed) == expected[k:]


def test_set_epoch_of_the_loader_reaches_the_batches():
    batches = loader(40)
    first = ids(batches)
    batches.set_epoch(1)
    assert ids(batches) != first
    batches.set_epoch(0)
    assert ids(batches) == first and len(batches) == len(first)


def test_a_fetch_leaves_the_runs_random_numbers_alone():
    import torch

    before = torch.get_rng_state()
    ids(loader(20))
    assert torch.equal(torch.get_rng_state(), before)  # else dropout would depend on the number of ranks


def test_filler_counts_for_nothing_but_can_be_attended_to():
    last = list(loader(9, micro=4, accumulation=1, world=1))[-1]
    real = last["labels"] != IGNORED
    assert real.sum() == 1 and real[0].any()  # 9 samples: one in the last batch of 4
    assert (last["attention_mask"].sum(1) > 0).all()  # a row without any makes softmax NaN


@given(st.integers(9, 60), sizes, sizes, st.integers(1, 3), st.integers(0, 3))
def test_every_rank_knows_the_supervised_tokens_of_a_step(n, micro, accumulation, world, epoch):
    supervised = np.arange(1, n + 1) ** 2
    every = []
    for rank in range(world):
        batches = GlobalBatches(n, micro, accumulation, rank, world, 3, supervised)
        batches.set_epoch(epoch)
        every.append(list(batches))
    for step in range(len(every[0]) // accumulation):
        parts = [b for rank in every for b in rank[step * accumulation : (step + 1) * accumulation]]
        total = sum(int(supervised[i]) for part in parts for i in part if i != FILLER)
        assert {part.supervised for part in parts} == {total}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 3))
def test_padding(lengths, pad):
    samples = [row([7 + i] * n, [IGNORED] * (n - 1) + [7 + i]) for i, n in enumerate(lengths)]
    batch = Collate(pad, Layout(padding_free=False, packed=False, cumulative=False))((samples, None))
    about = batch.pop(ABOUT)
    assert (about.tokens, about.slots) == (sum(lengths), len(lengths) * max(lengths))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (len(lengths), max(lengths))
    )
    for number, (sample, n) in enumerate(zip(samples, lengths, strict=True)):
        assert batch["input_ids"][number].tolist() == sample["input_ids"].tolist() + [pad] * (max(lengths) - n)
        assert batch["labels"][number].tolist() == sample["labels"].tolist() + [IGNORED] * (max(lengths) - n)
        assert batch["attention_mask"][number].tolist() == [1] * n + [0] * (max(lengths) - n)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 16))
def test_end_to_end(lengths, multiple):
    """No padding but up to the multiple; positions start again; a logit just where a label follows."""
    samples = [row(range(10, 10 + n), [IGNORED, *range(11, 10 + n)]) for n in lengths]
    batch = Collate(0, Layout(padding_free=True, packed=False, cumulative=True, multiple=multiple))((samples, 7))
    tokens, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert len(tokens) % multiple == 0 and len(tokens) - sum(lengths) < multiple
    assert tokens[: sum(lengths)] == [10 + i for n in lengths for i in range(n)]
    assert batch["position_ids"][0].tolist()[: sum(lengths)] == [i for n in lengths for i in range(n)]
    assert batch["cu_seq_lens_q"].tolist()[: len(lengths) + 1] == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    kept, targets = batch["logits_to_keep"].tolist(), batch["shift_labels"][0].tolist()
    wanted = [(i - 1, label) for i, label in enumerate(labels) if label != IGNORED] or [(0, IGNORED)]
    assert list(zip(kept, targets, strict=True)) == wanted
    assert batch[ABOUT].step_supervised == 7


@pytest.mark.parametrize("pad", [0, 9])
def test_a_batch_of_filler_alone_has_no_label(pad):
    samples = WithFiller(dataset(2), pad)
    for padding_free in (True, False):
        layout = Layout(padding_free, packed=False, cumulative=True)
        batch = Collate(pad, layout)(samples.__getitems__([FILLER, FILLER]))
        assert (batch["labels"] == IGNORED).all() and batch[ABOUT].tokens == 0
    assert len(samples) == 2  # filler is no part of the data set
