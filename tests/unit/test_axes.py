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


@pytest.mark.parametrize("pipeline, words", [
    ({"schedule": "zbv"}, "the schedule zbv of a pipeline with one stage"),
    ({"virtual_stages": 2}, "virtual_stages 2 of a pipeline with one stage"),
    ({"schedule": "nonsense"}, "interleavedzerobubble, zbv"),
    ({"schedule": "gpipe", "stages": 2, "virtual_stages": 2}, "gpipe takes 1"),
])  # fmt: skip
def test_a_schedule_is_a_pipelines(pick_config, pick, mistake, pipeline, words):
    assert words in mistake(pick_config, {"zero_optimization": {"stage": 1}, "pipeline": pipeline})
    names = {"stages": "size"}
    mesh = {f"parallelism_config_pp_{names.get(key, key)}": value for key, value in pipeline.items()}
    document = {"distributed_type": "MULTI_GPU", "parallelism_config": mesh}
    assert words in mistake(pick, cluster={"accelerate_config": document})


@pytest.mark.parametrize("ours, theirs, found", [
    ({"stages": 2, "schedule": "gpipe"}, {"pp_schedule": "1f1b"}, "pp_schedule is 1f1b, but pipeline.schedule"),
    ({"stages": 2, "virtual_stages": 3}, {"pp_virtual_stages": 2}, "pp_virtual_stages is 2, but pipeline.virtual_stages"),
    ({"stages": 2}, {"pp_size": 4}, "pp_size is 4, but pipeline.stages"),
    ({"stages": 2}, {"pp_schedule": "gpipe"}, Axes(stages=2, schedule="gpipe")),
    ({"schedule": "gpipe"}, {"pp_size": 2, "pp_schedule": "GPipe"}, Axes(stages=2, schedule="gpipe")),
    ({"stages": 2, "virtual_stages": 2}, {"pp_size": 1, "pp_virtual_stages": 1}, Axes(stages=2, virtual=2)),
])  # fmt: skip
def test_a_mesh_beside_a_ds_config_says_the_same(pick, mistake, write_json, ours, theirs, found):
    file = write_json({"zero_optimization": {"stage": 1}, "pipeline": ours})
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": file}}
    document["parallelism_config"] = {f"parallelism_config_{key}": value for key, value in theirs.items()}
    if isinstance(found, str):
        assert found in mistake(pick, cluster={"accelerate_config": document})
    else:
        assert pick(cluster={"accelerate_config": document}).axes == found
