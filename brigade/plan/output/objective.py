"""Print what is learned where that is which answers are better, what it takes to compare them, and what images take."""

from collections.abc import Iterator
from pathlib import Path

from ...errors.console import billions, figure
from ...errors.tables import table
from ...train.recipe.objectives import ADAPTERS_OFF, DISTILL, SFT, bytes_of_token
from ..choice.goals import BILLION
from ..costs.activations import tower_bytes
from ..costs.estimate import Estimate
from ..costs.job import PROJECTOR, VISION_TOWER, Comparison
from ..costs.memory import GIB
from .show import say

WORDS = table(Path(__file__).with_name("words.yaml"))


def say_objective(result: Estimate, length: int) -> None:
    """Print nothing for supervised fine-tuning. length: tokens of a sample at most"""
    comparison = result.job.comparison
    if comparison.objective == SFT:
        return
    each = WORDS["rows"][comparison.rows]["each"].format(length=length)
    say("learns", f"{comparison.title}, from {each}. No run was compared with this")
    for number, line in enumerate(_compared(result)):
        say("" if number else "compares", line)


def _second(comparison: Comparison) -> str:
    if comparison.reference == ADAPTERS_OFF:
        return "adapters off"
    return "the teacher" if comparison.objective == DISTILL else "a second model"


def _compared(result: Estimate) -> Iterator[str]:
    """Yield what answers are compared with, and what that takes in memory and time."""
    job, comparison = result.job, result.job.comparison
    looks = []
    if comparison.reference and not comparison.precomputed:
        looks.append(_second(comparison))
    if comparison.asks_for.mismatched:
        looks.append("answers to other prompts")
    if looks:
        passes = comparison.asks_for.mismatched + (0 if comparison.precomputed else comparison.looks)
        more = "a forward pass" if passes == 1 else f"{passes} forward passes"
        took = f"{figure(result.time.comparing, 2)} of the {figure(result.time.total, 2)} s"
        yield f"with {' and '.join(looks)}: {more} without gradients in each step, {took}"
        bits = "4 bits" if comparison.in_4bit else "half precision"
        kept = f"{result.memory.reference / GIB:.1f} GiB on each GPU hold its weights in {bits}, all the time"
        yield kept if comparison.stays else "they take no memory beyond what the step takes with gradients"
        own = comparison.asks_for.mismatched or not comparison.stays  # passes of the trained model
        if own and job.deepspeed and job.stage == 3:
            yield "ZeRO-3 then records anew in which order it gathers weights, which is not counted (docs/preferences.md)"
    if comparison.precomputed:
        teaches = comparison.objective == DISTILL
        who = _second(comparison) if teaches else "another model" if comparison.shape else "the untrained model"
        hours = result.hours_before(BILLION)
        spent = f"{figure(hours, 2)} hours, {figure(hours * job.gpus, 1)} GPU-hours, for a billion tokens of data"
        yield f"with {who}, once before training: {spent}, kept beside the prepared data"
        yield "its weights are in memory until then" if comparison.shape else "nothing of it stays in memory"
        if comparison.kept:
            size = BILLION * bytes_of_token(comparison.kept, job.shape.vocab) / GIB
            yield f"{comparison.kept:,} words of each token: {size:,.0f} GiB of disk on each host for a billion supervised tokens"


PARTS = {VISION_TOWER: "vision tower", PROJECTOR: "projector"}


def say_images(result: Estimate) -> None:
    """Print nothing where there are none."""
    job, images = result.job, result.job.images
    if not images:
        return
    size = f"{images.width:,} x {images.height:,} pixels"
    size += ", as is assumed without --image-size" if images.assumed else ""
    each = images.each
    becomes = f"{each.tokens:,} tokens and {each.patches:,} patches each"
    say("images", f"{images.per_sample:g} in a sample, {size}: {becomes}")
    share = f"{images.tokens / job.sequence:.0%}"
    of_images = f"{images.tokens:,.0f} of the {job.sequence:,} tokens of a sequence are images' ({share})"
    say("", f"{of_images}, in speed and duration too")
    tower, projector = (billions(count) for count in (images.tower.parameters, images.tower.projector))
    trains = " and ".join(PARTS[part] for part in PARTS if part in images.trained)
    how = "adapters on " if job.method != "full" else ""
    what = f"{how}the {trains}: trained" if trains else "frozen"
    say("", f"vision tower {tower} parameters, projector {projector}; {what}")
    kept, most = tower_bytes(job)
    took = f"{figure(result.time.images, 2)} of the {figure(result.time.total, 2)} s of a step"
    say("", f"they keep {kept / GIB:.2f} GiB of a micro-batch on each GPU, {most / GIB:.2f} at most; {took}")
    unmeasured = "no GPU has measured images, and a rank whose samples have more of them needs more than this mean"
    say("", f"by formula: {unmeasured}")
