"""Count the model states of a rank of each stage. Bytes. docs/evidence/states.md compares them with what is measured."""

import operator
from dataclasses import replace

from ...train.strategy.state_bytes import SUB_GROUP_SIZE, StateBytesPerRank, model_states, optimizer_bytes
from .division import division
from .job import Job
from .stages import Stage, frozen_bytes, stages


def stage_states(job: Job, stage: Stage) -> tuple[StateBytesPerRank, float]:
    """Return (what one rank of a stage holds in the optimizer's step, its gradients until then).

    Fewer ranks are left to share the states of experts that expert parallelism has divided.
    """
    full = job.method == "full"
    frozen = _beside(job, stage) if full else frozen_bytes(job, stage.parameters)
    if job.deepspeed and job.stage == 3 and stage.whole:
        return _beside_autotp(job, stage)
    if not stage.experts:
        return _shared(job, stage.trained, frozen, job.shard_ranks)
    trained, under = stage.experts * full, 2 * stage.experts * (not full)
    dense, held = _shared(job, stage.trained - trained, frozen - under, job.shard_ranks)
    experts, held_too = _shared(job, trained, under, division(job).same_experts[0])
    return _sum(dense, experts), held + held_too


def _beside(job: Job, stage: Stage) -> float:
    """Return the bytes of what a stage holds and full fine-tuning freezes: a vision tower, in the precision of all weights."""
    return (2 if job.deepspeed else job.conventions.weights) * (stage.parameters - stage.trained)


def _sum(one: StateBytesPerRank, other: StateBytesPerRank) -> StateBytesPerRank:
    return StateBytesPerRank(*map(operator.add, vars(one).values(), vars(other).values()))


def _beside_autotp(job: Job, stage: Stage) -> tuple[StateBytesPerRank, float]:
    """Return what stage_states() does, under ZeRO-3 with a tensor group.

    DeepSpeed has sharded all parameters over all ranks before AutoTP divides some, and those that it leaves whole stay so.
    They are a sub-group of their own, which is not stepped together with the others.
    """
    n, over_all = job.shard_ranks, job.shard_ranks * job.tensor
    if job.method != "full":  # adapters come later, and are sharded as what is divided
        divided, held = _shared(job, stage.trained, frozen_bytes(job, stage.parameters - stage.whole), n)
        return _sum(divided, _shared(job, 0.0, frozen_bytes(job, stage.whole), over_all)[0]), held
    divided, held = _shared(job, stage.trained - stage.whole, _beside(job, stage), n)
    whole, held_too = _shared(job, stage.whole, 0.0, over_all)
    both = _sum(divided, whole)
    not_yet = 4 * min(
        (stage.trained - stage.whole) / n, stage.whole / over_all, SUB_GROUP_SIZE
    )  # copies of the smaller sub-group
    return replace(both, gradients=max(0.0, both.gradients - not_yet)), held + held_too


def beside_matrices(job: Job) -> float:
    """Return the share of a model's parameters that the optimizer does not take for matrices. Vectors are too few to count."""
    if job.optimizer != "muon":
        return 0.0
    return min(1.0, (job.shape.embedding + job.shape.head) / job.shape.parameters)


def own_bytes(job: Job) -> float:
    """Return the bytes per parameter of the optimizer's own states."""
    return optimizer_bytes(job.optimizer, beside_matrices(job))


def _shared(job: Job, trained: float, frozen: float, n: int) -> tuple[StateBytesPerRank, float]:
    """Return what stage_states() does, for parameters of which `n` ranks hold one copy together."""
    engine, stage = job.conventions, job.stage
    if job.deepspeed or job.engine in ("ddp", "fsdp2"):
        kind = f"zero{stage}" if job.deepspeed else job.engine
        states = model_states(
            kind,
            round(trained),
            n,
            half=True,
            optim=job.optimizer,
            hpz=job.hpz,
            frozen=frozen,
            adapters=job.method != "full",
            beside=beside_matrices(job),
        )
        if job.offload:  # gradients go to the host as they come; "all" and "nvme" leave nothing but what is gathered
            return StateBytesPerRank(states.parameters if job.offload == "optimizer" else 0.0, 0.0, 0.0), 0.0
        return states, engine.gradients * trained / (n if stage >= 2 else 1)
    own = own_bytes(job)
    moments = engine.optimizer if own == 8 else own
    weight = (engine.weights if job.method == "full" else 4) * trained + frozen
    over = [n if stage >= at else 1 for at in (3, 2, 1)]
    held = engine.gradients * trained / over[1]
    return StateBytesPerRank(weight / over[0], held, moments * trained / over[2]), held


def first_stage_states(job: Job) -> tuple[StateBytesPerRank, float]:
    """Return stage_states() of the first stage of a pipeline, or of all where there is none."""
    return stage_states(job, stages(job)[0])
