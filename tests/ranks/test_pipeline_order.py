"""The passes of train.py's pipeline, as benchmarks/bubble.py records them: their order idles as its formula says, and none begins
before what it needs has ended. How long they take plays no part."""

from dataclasses import replace

import pytest

from benchmarks import bubble, bubble_lines
from brigade.train.engines.parallel import pipeline_schedule

WAY = replace(bubble.WAYS["stretched"], seconds=0.0, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_order_of_a_real_step_idles_as_its_formula_says(ranks):
    todo = bubble.cases(ranks, [4])
    assert {name for name, _ in todo} == set(bubble.SCHEDULES)
    for (name, count), (layers, (lines,)) in zip(todo, bubble.record(WAY, ranks, todo), strict=True):
        formula = pipeline_schedule.bubble(bubble.axes(name, ranks), count)
        assert bubble_lines.by_order(lines) == [pytest.approx(formula)] * ranks, name
        assert layers == [8 // ranks] * ranks
        passes = [each for line in lines for each in line]
        ended = {(stage, number, kind == "F"): end for stage, kind, number, _, end in passes if kind != "W"}
        for stage, kind, number, begin, _ in passes:
            if kind != "W":
                before = (stage - 1, number, True) if kind == "F" else (stage + 1, number, False)
                assert begin >= ended.get(before, begin), (name, stage, kind, number)
