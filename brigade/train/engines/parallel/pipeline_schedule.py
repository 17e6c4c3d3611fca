"""The order in which a pipeline's stages compute: schedules by name, which rank has which stages, and how long ranks idle."""

from typing import Any

from torch.distributed.pipelining import PipelineStage, schedules

from ...strategy.axes import Axes
from ...upstream.pipelining import Schedule

CLASSES = {
    "gpipe": schedules.ScheduleGPipe,  # Huang et al. 2019, arXiv 1811.06965
    "1f1b": schedules.Schedule1F1B,  # Narayanan et al. 2019 and 2021, arXiv 2104.04473
    "interleaved1f1b": schedules.ScheduleInterleaved1F1B,  # 2104.04473, section 2.2
    "interleavedzerobubble": schedules.ScheduleInterleavedZeroBubble,  # Qi et al. 2024, arXiv 2401.10241
    "zbv": schedules.ScheduleZBVZeroBubble,  # 2401.10241, section 6: in a V, two stages on each rank
}

SPLIT_BACKWARD = ("interleavedzerobubble", "zbv")  # gradients of inputs at once, those of weights later


def stages_of(axes: Axes, rank: int) -> list[int]:
    """Return the stages that a rank of a pipeline has, of axes.stages * axes.virtual."""
    if axes.chosen_schedule == "zbv":
        return [rank, 2 * axes.stages - 1 - rank]
    return [rank + chunk * axes.stages for chunk in range(axes.virtual)]


def rank_of(axes: Axes, stage: int) -> int:
    """Return the rank of a pipeline that has a stage."""
    return next(rank for rank in range(axes.stages) if stage in stages_of(axes, rank))


def make(axes: Axes, stages: list[PipelineStage], micro_batches: int) -> Schedule:
    """Return torch's schedule for the stages of this rank. The last stage returns the loss itself."""
    name = axes.chosen_schedule
    if name == "1f1b" and micro_batches < axes.stages:  # torch refuses; all forward passes come first in both
        name = "gpipe"
    options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    of_stages = stages[0] if name in ("gpipe", "1f1b") else stages
    return CLASSES[name](of_stages, micro_batches, **options)


def refusal(axes: Axes, micro_batches: int) -> str:
    """Return why a schedule cannot take so many micro-batches, or ""."""
    name, rounds = axes.chosen_schedule, max(1, micro_batches // axes.stages)
    if name.startswith("interleaved") and (micro_batches < axes.stages or micro_batches % rounds):
        return f"{name} takes micro-batches in rounds of {axes.stages}, and {micro_batches} do not fill them"
    return ""


def bubble(axes: Axes, micro_batches: int) -> float:
    """Return the share of a step in which a rank idles, with p ranks, v stages on each and m micro-batches: w / (m + w), where a
    rank waits for as long as w micro-batches take. All stages are taken to need the same time, a third of it each for the forward
    pass, gradients of inputs and gradients of weights.

    w = (p - 1) / v (2104.04473, section 2.2), and a third of it where gradients of weights are computed meanwhile (2401.10241,
    section 2.1). torch orders ZBV for at least 2 p - 1 micro-batches, and leaves out missing ones (docs/evidence/pipeline.md).
    """
    p, name = axes.stages, axes.chosen_schedule
    waits = (p - 1) / axes.virtual / (3 if name in SPLIT_BACKWARD else 1)
    if name == "zbv":
        waits = max(waits, (2 * p - 1 - micro_batches) / 3)
    return waits / (micro_batches + waits)
