"""Which ranks work together along each axis, and which numbers of ranks the axes divide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.host.cluster import World
from brigade.train.recipe import flags
from brigade.train.strategy import axis_rules
from brigade.train.strategy.axes import Axes, without
from brigade.train.strategy.axis_keys import groups, of_ds_config, with_axes

SIZES = st.builds(Axes, *(st.integers(1, 4) for _ in range(3)))
AXES = ("tensor", "sequence", "data", "stage")


@given(SIZES, st.integers(1, 4))
def test_groups_of_each_axis_hold_every_rank_once(axes, data):
    size = axes.model * data
    for axis in AXES:
        found = groups(axes, size, axis)
        assert sorted(rank for group in found for rank in group) == list(range(size))
        for group in found:
            places = [vars(axes.place(rank, size)) for rank in group]
            assert [place[axis] for place in places] == list(range(len(group)))
            assert len({tuple(place[other] for other in AXES if other != axis) for place in places}) == 1


@given(SIZES, st.integers(1, 4))
def test_one_rank_speaks_for_each_share_of_the_data(axes, data):
    size = axes.model * data
    speakers = [place for rank in range(size) if (place := axes.place(rank, size)).speaks_for_its_data]
    assert sorted((place.data, place.sequence) for place in speakers) == [
        (d, s) for d in range(data) for s in range(axes.sequence)
    ]


def test_tensor_groups_lie_inside_a_host_and_stages_across():
    axes = Axes(tensor=8, stages=2)
    assert groups(axes, 16, "tensor") == [[*range(8)], [*range(8, 16)]]
    assert groups(axes, 16, "stage")[3] == [3, 11]


@given(st.builds(Axes, *(st.integers(1, 4) for _ in range(4))))
def test_a_ds_config_says_its_axes_and_is_the_same_without_them(axes):
    plain = {"zero_optimization": {"stage": 1}}
    said = with_axes(plain, axes)
    assert of_ds_config(said) == axes and without(said) == plain


@pytest.mark.parametrize(("axes", "ranks", "local", "words"), [
    (Axes(tensor=4), 6, 6, "needs a multiple of 4 ranks, and there are 6"),
    (Axes(tensor=2, stages=2), 6, 6, "tensor 2 x pipeline 2 needs a multiple of 4"),
    (Axes(experts=4), 6, 6, "expert 4 needs a multiple of 4"),
    (Axes(tensor=4), 8, 2, "tensor groups of 4 ranks would cross hosts of 2"),
])  # fmt: skip
def test_sizes_that_do_not_fit_the_ranks(axes, ranks, local, words, mistake):
    world = World(0, 0, ranks, local, "node1", "torchrun")
    assert words in mistake(axis_rules.check, axes, "ds.json", flags.load([]), world)
