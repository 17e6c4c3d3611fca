"""How a model is divided over the ranks of a job's axes: layers, the vocabulary's two ends, adapters and experts; and what
a rank of each stage then has, its model states among it (docs/evidence/states.md compares them with what is measured). Bytes."""

import functools
import operator
from dataclasses import dataclass, replace

from ...train.model.experts import shards
from ...train.strategy.state_bytes import SUB_GROUP_SIZE, StateBytesPerRank, model_states, optimizer_bytes
from ..constants import CONSTANTS
from ..shape.lora import linears
from .job import Job


class Division:
    """How train.py divides a model. Of tensor groups: Transformers' plans, with norms and routers whole on each rank."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has: the most costly stage is as cheap as possible; a head costs as much as its product."""
        job, shape = self.job, self.job.shape
        if job.pipeline == 1:
            return [shape.layers]
        head = shape.vocab * shape.hidden / shape.layer_matmul
        chunks = _cheapest(shape.layers, job.pipeline * job.virtual, head)
        return [sum(chunks[rank :: job.pipeline]) for rank in range(job.pipeline)]

    @property
    def whole_norms(self) -> bool:
        """Whether each rank of a tensor group has whole norms and routers, and not a part of them."""
        return self.job.tensor > 1

    @property
    def ends(self) -> tuple[int, int]:
        """How many ranks of a tensor group (the embedding, the output head) is divided over.

        Transformers' plans divide both. Where the two are one weight, train.py's own division leaves it whole
        (train/engines/parallel/tensor.py); AutoTP divides it, unless there are adapters (train/engines/deepspeed_engine.py),
        and leaves an embedding of its own whole (deepspeed, module_inject/tp_plan_converter.py).
        """
        tensor, auto = self.job.tensor, self.job.deepspeed
        if self.job.shape.tied:
            return (tensor, tensor) if auto and self.job.method == "full" else (1, 1)
        return (1 if auto else tensor), tensor

    @property
    def logits(self) -> int:
        """How many ranks logits stay divided over: they are gathered, except AutoTP's of a head that is the embedding."""
        job = self.job
        return job.tensor if job.deepspeed and job.shape.tied and job.method == "full" else 1

    @property
    def adapters(self) -> float:
        """The share of adapters that one rank of a tensor group has.

        Of an adapter's two matrices the one with the divided side of its base is divided: B where the base's outputs are
        divided, A where its inputs are.
        """
        job = self.job
        if job.tensor == 1:
            return 1.0
        whole = cut = 0
        for moe, count in job.shape.kinds:
            # Of no hybrid: all layers have them.
            for reads, inner, outer, _ in linears(job.shape, job.targets, moe=moe):
                by_input = reads in ("attention", "activation")
                whole += count * (outer if by_input else inner)
                cut += count * (inner if by_input else outer)
        return (whole + cut / job.tensor) / (whole + cut)

    @property
    def whole_experts(self) -> bool:
        """Whether a tensor group divides the tokens of experts, and not their matrices."""
        return self.job.expert > 1

    @property
    def experts(self) -> int:
        """How many ranks of a stage one copy of the experts is spread over.

        Tensor parallelism cuts each expert, unless expert parallelism needs its ranks as well.
        """
        job = self.job
        together = job.expert <= job.data * job.context and not self.whole_experts
        return job.expert * (job.tensor if together else 1)

    @property
    def expert_stride(self) -> int:
        """How far apart two ranks of an expert group are: train.py's groups are of neighbours."""
        return 1

    @property
    def same_experts(self) -> tuple[int, int]:
        """(ranks that shard one copy of the same experts, all ranks of a stage that hold them) under expert parallelism."""
        job = self.job
        of_stage = job.data * job.context * job.tensor
        # Groups of neighbours, of any axis, within a copy of all else.
        sharing = shards(job.expert, of_stage if job.pipeline > 1 else job.shard_ranks * job.tensor)
        return sharing, max(1, of_stage // self.experts)


@functools.singledispatch
def division(job: Job) -> Division:
    """Return how a job's model is divided."""
    return Division(job)


@functools.cache
def _cheapest(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Return the layers of each stage for which the most costly stage costs least, and the most even of such divisions.

    head: what the last stage has besides, in layers. Every stage has at least one layer
    (train/engines/parallel/pipeline_split.py).
    """

    def others(last: int) -> list[int]:
        each, more = divmod(layers - last, stages - 1)
        return [each + (stage >= stages - 1 - more) for stage in range(stages - 1)]

    def cost(last: int) -> tuple[float, float]:
        every = [*others(last), last + head]
        return max(every), sum(layers**2 for layers in every)

    last = min(range(1, layers - stages + 2), key=cost)
    return (*others(last), last)


@dataclass(frozen=True)
class Stage:
    """The parameters of one rank.

    parameters: over tensor and expert parallelism; experts: those among them that expert parallelism divides
    whole: those among them that every rank of a tensor group has
    embedding, head: those among them of the two ends; a head that is the embedding counts where it is another copy
    """

    place: int
    last: bool
    layers: int
    parameters: float
    trained: float
    experts: float
    embedding: float
    head: float
    whole: float = 0.0


def stages(job: Job) -> list[Stage]:
    """What each stage of the pipeline computes and holds; one stage where there is no pipeline."""
    s, t, parts = job.shape, job.tensor, division(job)
    of_job, whole, (of_embedding, of_head) = [], parts.whole_norms, parts.ends

    def divided(parameters: float, undivided: float) -> float:
        return (parameters - undivided * whole) / t + undivided * whole

    dense = s.dense_layers * divided(s.dense_layer, s.undivided())
    per_layer = (dense + s.moe_layers * divided(s.moe_base, s.undivided(moe=True))) / s.layers
    whole_per_layer = (s.dense_layers * s.undivided() + s.moe_layers * s.undivided(moe=True)) / s.layers * whole
    for place, layers in enumerate(parts.layers):
        first, last = place == 0, place == job.pipeline - 1
        head = last * (s.head or (0 if first else s.vocab * s.hidden)) / of_head  # a copy on the last where it is tied
        embedding = first * s.embedding / of_embedding
        experts = layers / s.layers * s.moe_layers * s.experts * s.expert / parts.experts
        ends = embedding + head + last * divided(s.final_norm, s.final_norm) + first * s.other
        psi = layers * per_layer + ends + experts
        trained = job.trained * parts.adapters * layers / s.layers if job.trained else psi - first * job.frozen_beside
        spread = experts if job.expert > 1 else 0.0
        ends_whole = embedding * (of_embedding == 1) + head * (of_head == 1) + last * s.final_norm
        undivided = layers * whole_per_layer + ends_whole * whole
        of_job.append(Stage(place, last, layers, psi, trained, spread, embedding, head, undivided))
    return of_job


def gathered_bytes(job: Job, psi: float) -> float:
    """Return the bytes of `psi` parameters as they are gathered or moved: in half precision, except under QLoRA."""
    return frozen_bytes(job, psi) if job.method == "qlora" else job.conventions.gathered * psi


@functools.singledispatch
def frozen_bytes(job: Job, psi: float) -> float:
    """Return the bytes of weights under adapters: in bf16, or in linear layers four bits with nested constants (QLoRA).

    Experts are no linear layers since Transformers 5: it holds those of a layer in one 3D parameter, and gives bitsandbytes
    only nn.Linear (transformers, integrations/bitsandbytes.py: replace_with_bnb_linear). A vision tower and its projector
    stay in bf16 too (train/model/load.py: quantization_config).
    """
    if job.method == "full":
        return 0.0
    if job.method == "lora":
        return 2 * psi
    s = job.shape
    whole = (s.embedding + s.head + s.moe_layers * s.experts * s.expert) / job.tensor / job.pipeline
    whole += job.images.tower.parameters + job.images.tower.projector if job.images else 0
    return 2 * whole + (CONSTANTS.nf4_cut_bytes if job.tensor > 1 else CONSTANTS.nf4_bytes) * (psi - whole)


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
    # Copies of the smaller sub-group.
    not_yet = 4 * min((stage.trained - stage.whole) / n, stage.whole / over_all, SUB_GROUP_SIZE)
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
