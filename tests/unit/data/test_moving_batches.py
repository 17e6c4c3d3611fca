"""Which samples the replicas of an elastic run take, whoever is away and when: all, if need be at the end."""

from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from brigade.train.data.moving_batches import MovingBatches, Shares
from brigade.train.data.sampling import FILLER, GlobalBatches

SAMPLES, EVERY, REPLICAS, MICRO, ACCUMULATION = 22, 4, 3, 1, 2
AN_EPOCH = 4  # steps of 6 samples; the last has two fillers


def batches(rank, shares, step=0):
    return MovingBatches(SAMPLES, MICRO, ACCUMULATION, rank, REPLICAS, 7, step=lambda: step, shares=shares)


def run(steps, there_in_round):
    """The samples trained on in each step, by replicas that meet every EVERY steps and at the end; shares as they are then.

    there_in_round: who is there, round by round; when it ends, all are
    """
    shares, trained, rounds = Shares(steps, REPLICAS), [], iter(there_in_round)
    taken = [iter(endless(batches(rank, shares))) for rank in range(REPLICAS)]
    step = 0
    while step < shares.end:
        there, until = next(rounds, {0, 1, 2}), min(step - step % EVERY + EVERY, shares.end)
        while step < until:
            here = [[next(taken[rank]) for _ in range(ACCUMULATION)] for rank in range(REPLICAS)]
            trained.append([sample for rank in there for micro in here[rank] for sample in micro if sample != FILLER])
            step += 1
        shares.meet(step, there)
    return trained, shares


def endless(batches):
    while True:
        yield from batches


MEMBERS = st.sets(st.integers(0, REPLICAS - 1), min_size=1)


@given(steps=st.integers(1, 3 * AN_EPOCH), there=st.lists(MEMBERS, max_size=12))
def test_every_sample_of_the_run_is_trained_on_as_often_as_without_faults(steps, there):
    trained, shares = run(steps, there)
    undisturbed, _ = run(steps, [])
    assert Counter(chain(*trained)) == Counter(chain(*undisturbed))
    assert shares.due == [] and shares.behind == len(trained) - steps and shares.end == len(trained)


@given(steps=st.integers(1, 3 * AN_EPOCH), more=st.integers(1, 8), there=st.lists(MEMBERS, max_size=12))
def test_a_run_that_is_lengthened_later_does_not_lose_or_repeat_any_either(steps, more, there):
    _, shares = run(steps, there)
    longer = Shares(steps + more, REPLICAS)
    longer.load(shares.state())
    assert longer.end == shares.end + more
    further = [longer.share(step, replica) for step in range(longer.at, longer.end) for replica in range(REPLICAS)]
    assert further == [(step, replica) for step in range(steps, steps + more) for replica in range(REPLICAS)]


def test_who_joins_takes_its_place_in_the_steps_that_are_left():
    """Gets the very samples that the run's steps have, across epochs, whatever epoch the Trainer believes in."""
    whole = []
    for epoch in range(3):
        plain = GlobalBatches(SAMPLES, MICRO, ACCUMULATION, 1, REPLICAS, 7)
        plain.set_epoch(epoch)
        whole += list(plain)
    joined = batches(1, Shares(100, REPLICAS), step=2)
    found = []
    for _ in range(2):
        joined.set_epoch(0)
        found += list(joined)
    assert found == whole[2 * ACCUMULATION : (2 + 2 * AN_EPOCH) * ACCUMULATION]


def test_the_learning_rate_goes_by_what_was_trained_on():
    shares = Shares(100, REPLICAS)
    shares.meet(30, {0, 1, 2})
    assert shares.behind == 0
    shares.meet(60, {0, 2})  # a third of 30 steps is missed
    assert (shares.behind, shares.end, shares.missed) == (10, 110, 30)
    shares.meet(110, {0, 1, 2})
    assert (shares.behind, shares.end, shares.due) == (10, 110, [])
