"""What the planner predicts of a run, beside what its first ten steps gave. Imported at the tenth, and the planner with it."""

import math
from dataclasses import replace
from typing import Any

import torch

from ..model.attention import SAMPLE_BY_SAMPLE
from ..planner.choice import job_of_run, margins
from ..planner.choice.job import Job
from ..planner.costs import calibration, hardware
from ..run.directory import Run, add_to_record
from ..upstream import attention_of
from . import micro_batch, preflight
from .throughput import STATES, STEPS, WARM_UP, device_name


def compare(run: Run, config: Any, trained: int, seen: dict[str, float]) -> None:
    """Print the line, and write the entry.

    config: the model's; trained: parameters with gradients; seen: what CompareWithPlan has measured
    """
    allocated = seen["allocated"] if torch.cuda.is_available() else None
    parts = {name: seen[name] for name in STATES if seen.get(name)} | {"peak": seen["allocated"]}
    measured = margins.Measured(STEPS, WARM_UP, seen["seconds"], seen["waited"], allocated, parts)
    name, promised, usual, reason = device_name(), None, None, ""
    device = hardware.gpu_of_device(name)
    if device is None:
        reason = f"the catalogue does not know device {name!r}; describe it under gpus: in {calibration.named()}"
    else:
        try:
            usual, largest = _as_seen(_job(run, config, trained, device.kind), config, seen)
            promised = margins.predict(usual, largest, device)
        except job_of_run.NotCovered as error:
            reason = str(error)
        except Exception as error:  # a run that trains does not end for an estimate's sake
            reason = f"the formulas fail on it ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    if device or name != "cpu":  # nobody plans for a CPU, unless they describe it as a kind of GPU
        print(*margins.report(promised, measured, reason), sep="\n", flush=True)
    entry = margins.entry(promised, measured, device, reason)
    add_to_record(run, "promise", entry | ({"job": job_of_run.record(usual)} if promised and usual else {}))


def _job(run: Run, config: Any, trained: int, gpu: str) -> Job:
    """The run as the planner's Job."""
    recipe = micro_batch.recipe_here(run.settings, preflight.liger(run.settings)[0])
    sizes = (run.world.size, run.world.local_size)
    trained = trained if recipe.model.use_peft else 0
    place = "the model's config"
    job = job_of_run.job_of_run(
        recipe, run.strategy, run.batch, *sizes, config.to_dict(), gpu, trained=trained, place=place
    )
    if job.replicas.every > STEPS:  # they have not met yet
        job = replace(job, replicas=replace(job.replicas, every=math.inf))
    return replace(job, attention=job_of_run.ATTENTION.get(attention_of(config), "flash2"))


def _as_seen(job: Job, config: Any, seen: dict[str, float]) -> tuple[Job, Job]:
    """The usual micro-batch of these steps, and the largest."""
    # Without cumulative lengths a mask hides the other samples of a row, and its products are computed all the same, those
    # above the diagonal too: the formulas count half of a square.
    masked = seen["row"] * (1 if job.attention == "eager" else 2)
    attended = seen["attended"] if attention_of(config) in SAMPLE_BY_SAMPLE else masked
    usual = job_of_run.as_seen(job, attended=attended, tokens=seen["tokens"], labelled=seen["labelled"])
    most = min(1.0, seen["most_labelled"] / seen["largest"])
    return usual, job_of_run.as_seen(job, attended=attended, tokens=seen["largest"], labelled=most)
