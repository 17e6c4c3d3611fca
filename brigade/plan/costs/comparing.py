"""Count what it takes to compare answers, or to ask a teacher: who looks at them without gradients, how often, and what a second
model holds.

train/loss/preferences.py, distillation.py and second_model.py are what is counted here. No GPU has measured any of it.
"""

from dataclasses import replace

from ...train.recipe.objectives import ADAPTERS_OFF, DISTILL
from .division import frozen_bytes
from .job import FUSED, Job, unset

Looks = list[tuple[Job, int]]  # a model as a job, and how often it looks at as many tokens as a step has


def reference_job(job: Job) -> Job:
    """Return a second model as a job: its weights are in half precision, and nothing of it is trained.

    Where the strategy shards weights, FSDP2 shards these over all ranks; elsewhere each rank has them whole. They are never
    quantised, offloaded or compiled, and Liger's kernels are not for them. The method `full` stands for having no adapters.
    """
    return replace(
        job,
        shape=job.comparison.shape or job.shape,
        stage=3 if job.stage >= 3 and not job.comparison.in_4bit else 0,
        kernels=job.kernels - FUSED,
        data=job.data * job.tensor * job.pipeline,  # nothing divides its layers
        **unset("engine", "shard", "hpz", "quantised", "offload", "checkpointing", "tensor", "pipeline", "expert"),
        **unset("method", "trained", "dora", "adapter_dropout"),
        loss="tiled" if job.loss == "tiled" else "released",
    )


def reference_weights(job: Job) -> float:
    """Return the bytes of a second model's weights on each rank."""
    second = reference_job(job)
    shape, ranks = second.shape, second.shard_ranks if second.stage else 1
    if job.comparison.in_4bit:
        return frozen_bytes(replace(second, method="qlora"), shape.parameters)
    head = shape.vocab * shape.hidden  # of a teacher: each rank has it whole (train/loss/distillation.py)
    whole = head if job.comparison.objective == DISTILL else 0
    return 2 * (whole + (shape.parameters - whole) / ranks)


def looks_of_a_step(job: Job) -> Looks:
    """Return who looks at answers in each step: the model itself at mismatched ones, and a reference that is not precomputed."""
    comparison = job.comparison
    looks = [(job, comparison.asks_for.mismatched)]
    if not comparison.precomputed:
        looks.append((_reference(job), comparison.looks))
    return [(model, times) for model, times in looks if times]


def looks_before_training(job: Job) -> Looks:
    """Return who looks once at all samples, before the first step."""
    return [(_reference(job), job.comparison.looks)] if job.comparison.precomputed else []


def _reference(job: Job) -> Job:
    """Return what looks for the reference: the trained model, without its adapters where they are off, or a second one.

    Switched off, adapters compute nothing; their layers still go through Python.
    """
    if job.comparison.reference == ADAPTERS_OFF:
        return replace(job, targets="", **unset("trained", "dora", "adapter_dropout"))
    return reference_job(job) if job.comparison.second else job
