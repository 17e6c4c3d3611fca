"""What is computed from a pipeline's time lines; and torch's orders of passes idle as long as the formulas say."""

from unittest.mock import MagicMock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import bubble_lines
from brigade.train.engines.parallel import pipeline_schedule
from brigade.train.strategy.axes import Axes


def line(*passes):
    """Passes without times: (stage, kind, micro-batch)."""
    return [(*each, 0.0, 0.0) for each in passes]


def one_stage_each(ranks, micro_batches, ahead):
    """Orders in which rank r computes ahead(r) forward passes, and from then on a backward one before each."""
    found = []
    for rank in range(ranks):
        first = min(ahead(rank), micro_batches)
        order = [(rank, "F", number) for number in range(first)]
        for number in range(micro_batches):
            order.append((rank, "B", number))
            if first + number < micro_batches:
                order.append((rank, "F", first + number))
        found.append(line(*order))
    return found


def by_torch(axes, micro_batches):
    """The order of torch's schedule for several stages on each rank."""
    stages = [
        MagicMock(num_stages=axes.every_stage, group_size=axes.stages, group_rank=0, stage_index=stage)
        for stage in pipeline_schedule.stages_of(axes, 0)
    ]
    order = pipeline_schedule.make(axes, stages, micro_batches).pipeline_order
    return [
        line(*((one.stage_index, one.computation_type.value, one.microbatch_index) for one in order[rank] if one))
        for rank in range(axes.stages)
    ]


def test_a_rank_idles_where_it_does_not_compute():
    lines = [
        [(0, "F", 0, 1.0, 2.0), (0, "B", 0, 4.0, 6.0)],
        [(1, "F", 0, 2.0, 3.0), (1, "B", 0, 3.0, 4.0)],
    ]
    assert bubble_lines.step_seconds(lines) == 5
    assert bubble_lines.idle(lines) == [pytest.approx(2 / 5), pytest.approx(3 / 5)]
    assert bubble_lines.idle_between(lines) == [pytest.approx(2 / 5), 0]


def test_an_order_is_replayed_as_soon_as_it_can_be():
    lines = [line((0, "F", 0), (0, "I", 0), (0, "W", 0)), line((1, "F", 0), (1, "I", 0), (1, "W", 0))]
    first, second = bubble_lines.replay(lines, lambda stage, kind: 3.0 if kind == "I" else 1.0)
    assert [each[3:] for each in second] == [(1, 2), (2, 5), (5, 6)]
    assert [each[3:] for each in first] == [(0, 1), (5, 8), (8, 9)]


def test_an_order_in_which_ranks_wait_for_each_other_is_told():
    lines = [line((0, "F", 0), (0, "B", 0), (0, "F", 1)), line((1, "F", 0), (1, "F", 1), (1, "B", 0))]
    with pytest.raises(ValueError, match="no rank can go on"):
        bubble_lines.replay(lines, lambda stage, kind: 1.0)


def test_passes_take_the_mean_of_their_stage_and_kind():
    lines = [[(0, "F", 0, 0.0, 1.0), (0, "F", 1, 1.0, 4.0)], [(1, "F", 0, 5.0, 6.0), (1, "F", 1, 6.0, 7.0)]]
    # 0 to 2, 2 to 4; and 2 to 3, 4 to 5
    assert bubble_lines.at_their_own_times(lines) == [pytest.approx(1 / 5), pytest.approx(3 / 5)]


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_pass_in_two_parts_is_as_much_work_as_a_whole_one(first):
    whole, inputs, weights = (bubble_lines.work(kind, first) for kind in "BIW")
    assert whole == inputs + weights == 2


@given(st.integers(2, 9), st.integers(1, 20))
def test_1f1b_and_gpipe_idle_as_their_formula_says(ranks, micro_batches):
    formula = (ranks - 1) / (micro_batches + ranks - 1)
    assert pipeline_schedule.bubble(Axes(stages=ranks), micro_batches) == pytest.approx(formula)
    for ahead in (lambda rank: ranks - rank, lambda rank: micro_batches):
        lines = one_stage_each(ranks, micro_batches, ahead)
        assert bubble_lines.by_order(lines) == [pytest.approx(formula)] * ranks
        assert bubble_lines.held(lines[0]) == min(ahead(0), micro_batches)


@given(
    st.sampled_from([("interleaved1f1b", 2), ("interleaved1f1b", 3), ("interleavedzerobubble", 2), ("zbv", 2)]),
    st.integers(2, 8),
    st.integers(1, 20),
)
def test_torchs_schedules_idle_as_their_formula_says(schedule, ranks, micro_batches):
    name, virtual = schedule
    some = Axes(stages=ranks, schedule=name, virtual=virtual)
    assume(not pipeline_schedule.refusal(some, micro_batches))
    formula = pipeline_schedule.bubble(some, micro_batches)
    lines = by_torch(some, micro_batches)
    assert bubble_lines.by_order(lines) == [pytest.approx(formula)] * ranks


def test_zbv_fills_everything_between_a_ranks_own_passes():
    lines = by_torch(Axes(stages=4, schedule="zbv", virtual=2), 8)
    replayed = bubble_lines.replay(lines, lambda stage, kind: 1.0)
    assert bubble_lines.idle_between(replayed) == [0] * 4
    assert [bubble_lines.held(each) for each in lines] == [4] * 4
