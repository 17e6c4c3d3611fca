"""Model states in bytes per rank, by formula. docs/states.md compares them with what is measured."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..choice.job import Job
from .engines import OPTIMIZER_BYTES
from .stages import Stage, frozen_bytes, same_experts, stages

SUB_GROUP_SIZE = 10**9  # elements of ZeRO-3's shard that are stepped at once: DeepSpeed's default


@dataclass(frozen=True)
class StateBytesPerRank:
    """Bytes. optimizer: its own states and, under DeepSpeed, the fp32 master copy of the parameters."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def model_states(
    kind: str,
    parameters: int,
    ranks: int,
    half: bool,
    optim: str = "adamw_torch_fused",
    *,
    cut: int = 0,
    hpz: int = 0,
    frozen: float = 0,
) -> StateBytesPerRank:
    """What one rank holds of a model with `parameters` trained parameters, sharded over `ranks` ranks.

    kind: single, ddp, zero1, zero2, zero3, fsdp2 (hsdp: fsdp2 with `ranks` = its shard group)
    half: bf16 or fp16. DDP and FSDP2 keep fp32 weights and cast for the computation.
    cut: a rank's figure of cut_parameters(): ZeRO-1 and 2 keep the whole gradient of a parameter that a slice cuts
    hpz: ranks of one host, under ZeRO++'s zero_hpz_partition_size
    frozen: bytes of the weights under adapters: they have neither gradients nor states, and lie as trained ones do.
        QLoRA's quantisation constants are whole on every rank (0.13 bits per parameter, 0.5 if not nested).

    The base is Rajbhandari et al. 2020 (arXiv 1910.02054, table 1): with P parameters and mixed precision 2P weights,
    2P gradients and 12P optimizer states, of which ZeRO-1, 2 and 3 shard the last, the last two and all.
    What differs in DeepSpeed 0.19.8 (runtime/zero/), in fp32 training too:
    - Gradients are accumulated in the weights' precision and copied into fp32 for the step, and the first copy stays until
      the step's end (stage_1_and_2.py:3119, stage3.py:2686): (2 + 4) P/N. ZeRO-3 makes the second copy per sub-group.
    - ZeRO-1 reduces gradients after the last micro-batch; until then every rank holds all of them.
    - There is an fp32 master copy.
    - Of adapters the first copy is gone by then, and ZeRO-1 and 2 keep none of what a slice cuts (measured: docs/states.md).
    FSDP2 has none, and 16/N in any precision, as train.py has it reduce in every micro-step.
    """
    own = OPTIMIZER_BYTES.get(optim, 8)
    share = parameters / ranks
    weight = 2 if half else 4
    if kind in ("single", "ddp"):
        return StateBytesPerRank(4 * parameters + frozen, 4 * parameters, own * parameters)
    if kind in ("fsdp2", "hsdp"):
        return StateBytesPerRank(4 * share + frozen / ranks, 4 * share, own * share)
    optimizer = (4 + own) * share
    if kind == "zero3":
        copies = weight * share + frozen / ranks + ((weight * parameters + frozen) / hpz if hpz else 0)
        return StateBytesPerRank(copies, weight * share + 4 * min(share, SUB_GROUP_SIZE), optimizer)
    gradients = 4 * share + (0 if frozen else weight * (share + cut))
    if kind == "zero1":
        gradients = max(gradients, weight * parameters)
    return StateBytesPerRank(weight * parameters + frozen, gradients, optimizer)


def cut_parameters(sizes: Sequence[int], ranks: int) -> list[int]:
    """For each rank, the elements beyond its slice of the parameters that reach into it.

    ZeRO-1 and 2 lay all parameters in one row and cut it into `ranks` equal slices, through parameters.
    sizes: elements of each parameter, in the model's order.
    """
    slice_ = -(-sum(sizes) // ranks)
    spans = [(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    touched = (
        sum(end - start for start, end in spans if start < (rank + 1) * slice_ and end > rank * slice_)
        for rank in range(ranks)
    )
    return [max(0, elements - slice_) for elements in touched]


def stage_states(job: Job, stage: Stage) -> tuple[StateBytesPerRank, float]:
    """(what one rank of a stage holds in the optimizer's step, its gradients until then).

    Fewer ranks are left to share the states of experts that expert parallelism has divided.
    """
    frozen, full = frozen_bytes(job, stage.parameters), job.method == "full"
    if job.deepspeed and job.stage == 3 and stage.whole:
        return _beside_autotp(job, stage)
    if not stage.experts:
        return _shared(job, stage.trained, frozen, job.shard_ranks)
    trained, under = stage.experts * full, 2 * stage.experts * (not full)
    dense, held = _shared(job, stage.trained - trained, frozen - under, job.shard_ranks)
    experts, held_too = _shared(job, trained, under, same_experts(job)[0])
    return _sum(dense, experts), held + held_too


def _sum(one: StateBytesPerRank, other: StateBytesPerRank) -> StateBytesPerRank:
    return StateBytesPerRank(*map(operator.add, vars(one).values(), vars(other).values()))


def _beside_autotp(job: Job, stage: Stage) -> tuple[StateBytesPerRank, float]:
    """stage_states under ZeRO-3 with a tensor group.

    DeepSpeed 0.19.8 has sharded all parameters over all ranks before AutoTP divides some, and those that it leaves whole stay so.
    They are a sub-group of their own, which is not stepped together with the others.
    """
    n, over_all = job.shard_ranks, job.shard_ranks * job.tensor
    if job.method != "full":  # adapters come later, and are sharded as what is divided
        divided, held = _shared(job, stage.trained, frozen_bytes(job, stage.parameters - stage.whole), n)
        return _sum(divided, _shared(job, 0.0, frozen_bytes(job, stage.whole), over_all)[0]), held
    divided, held = _shared(job, stage.trained - stage.whole, 0.0, n)
    whole, held_too = _shared(job, stage.whole, 0.0, over_all)
    both = _sum(divided, whole)
    not_yet = 4 * min(
        (stage.trained - stage.whole) / n, stage.whole / over_all, SUB_GROUP_SIZE
    )  # copies of the smaller sub-group
    return replace(both, gradients=max(0.0, both.gradients - not_yet)), held + held_too


def _shared(job: Job, trained: float, frozen: float, n: int) -> tuple[StateBytesPerRank, float]:
    """stage_states of parameters of which `n` ranks hold one copy together."""
    engine, stage = job.conventions, job.stage
    if job.deepspeed or job.engine in ("ddp", "fsdp2"):
        kind = f"zero{stage}" if job.deepspeed else job.engine
        states = model_states(kind, round(trained), n, half=True, optim=job.optimizer, hpz=job.hpz, frozen=frozen)
        if job.offload:  # gradients go to the host as they come; "all" and "nvme" leave nothing but what is gathered
            return StateBytesPerRank(states.parameters if job.offload == "optimizer" else 0.0, 0.0, 0.0), 0.0
        return states, engine.gradients * trained / (n if stage >= 2 else 1)
    own = OPTIMIZER_BYTES[job.optimizer]
    moments = engine.optimizer if own == 8 else own
    weight = engine.weights * trained if job.method == "full" else 4 * trained + frozen
    over = [n if stage >= at else 1 for at in (3, 2, 1)]
    held = engine.gradients * trained / over[1]
    return StateBytesPerRank(weight / over[0], held, moments * trained / over[2]), held


def first_stage_states(job: Job) -> tuple[StateBytesPerRank, float]:
    """stage_states() of the first stage of a pipeline, or of all where there is none."""
    return stage_states(job, stages(job)[0])
