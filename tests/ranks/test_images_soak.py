"""Hundreds of steps with and without images at random: no rank waits for another one's tower, and the two stay the same."""

import math

import pytest

from testing import image_runs, marks
from testing.image_runs import Case, run_groups

LOSS = {60: 0.9, 300: 0.5}  # steps -> of the first loss


@pytest.mark.parametrize("steps", marks.cases(slow=[60], matrix=LOSS))
def test_ranks_with_images_and_without_never_wait_for_each_other(steps, tmp_path):
    image_runs.write_inputs(tmp_path, {"qwen3_vl"})
    cases = [Case("qwen3_vl", strategy, 2, image_runs.SMALL) for strategy in ("fsdp2", "zero3")]
    few = ["--max_steps", str(steps), "--eval_steps", "30", "--logging_steps", "10", "--learning_rate", "0.001"]
    logs = run_groups(tmp_path, {case: case.run(tmp_path, *few) for case in cases})
    for log in logs.values():
        losses = [entry["loss"] for entry in log if "loss" in entry]
        assert len(losses) == steps // 10 and all(map(math.isfinite, losses))
    sharded, partitioned = ([entry["loss"] for entry in log if "loss" in entry] for log in logs.values())
    assert sharded[:5] == pytest.approx(partitioned[:5], rel=1e-3)  # later, AdamW makes more of rounding
    assert sharded[-1] < LOSS[steps] * sharded[0]
