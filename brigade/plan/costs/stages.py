"""What each stage of a pipeline has on one rank before data-parallel sharding; without a pipeline there is one stage."""

import functools
from dataclasses import dataclass

from ...train.model.experts import shards
from ..shape.lora import linears
from .job import Job

NF4 = 0.516  # bytes of a weight in four bits, with nested constants of its blocks of 64 (arXiv 2305.14314, section 3)
NF4_CUT = 0.5625  # with plain ones, as tensor groups have them (engines/tensor_adapters.py)


@dataclass(frozen=True)
class Stage:
    """What one rank has.

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

    @property
    def first(self) -> bool:
        return self.place == 0


def stage_layers(job: Job) -> list[int]:
    """How many layers each stage has.

    Evenly; or by cost, of which the head has as much as its product weighs against a layer's: nanotron fills a stage after the
    other up to its share, train.py makes the most costly one as cheap as can be.
    """
    s, p = job.shape, job.pipeline
    if job.ours and p > 1:
        chunks = _cheapest(s.layers, p * job.virtual, s.vocab * s.hidden / s.layer_matmul)
        return [sum(chunks[rank::p]) for rank in range(p)]
    if not job.conventions.cut_by_cost:
        return [s.layers // p + (stage < s.layers % p) for stage in range(p)]
    share, counts, cost = (s.layers * s.layer_matmul + s.vocab * s.hidden) / p, [0], 0.0
    for _ in range(s.layers):
        if cost >= share * len(counts) and len(counts) < p:
            counts.append(0)
        counts[-1] += 1
        cost += s.layer_matmul
    return counts + [0] * (p - len(counts))


@functools.cache
def _cheapest(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers per stage so that the most costly stage costs least, the last one a head more, which is worth `head` layers; of such
    the most even. Every stage has a layer at least (engines/pipeline_split.py)."""

    def others(last: int) -> list[int]:
        each, more = divmod(layers - last, stages - 1)
        return [each + (stage >= stages - 1 - more) for stage in range(stages - 1)]

    def cost(last: int) -> tuple[float, float]:
        every = [*others(last), last + head]
        return max(every), sum(one * one for one in every)

    last = min(range(1, layers - stages + 2), key=cost)
    return (*others(last), last)


def stages(job: Job) -> list[Stage]:
    s, t = job.shape, job.tensor
    found = []
    whole = job.ours and t > 1  # norms and router
    of_embedding, of_head = vocabulary_divisors(job)

    def divided(parameters: float, undivided: float) -> float:
        return (parameters - undivided * whole) / t + undivided * whole

    dense = s.dense_layers * divided(s.dense_layer, s.undivided())
    per_layer = (dense + s.moe_layers * divided(s.moe_base, s.undivided(moe=True))) / s.layers
    whole_per_layer = (s.dense_layers * s.undivided() + s.moe_layers * s.undivided(moe=True)) / s.layers * whole
    for place, layers in enumerate(stage_layers(job)):
        first, last = place == 0, place == job.pipeline - 1
        head = last * (s.head or (0 if first else s.vocab * s.hidden)) / of_head  # a copy on the last where it is tied
        embedding = first * s.embedding / of_embedding
        experts = layers / s.layers * s.moe_layers * s.experts * s.expert / expert_divisor(job)
        ends = embedding + head + last * divided(s.final_norm, s.final_norm) + first * s.other
        psi = layers * per_layer + ends + experts
        trained = job.trained * adapter_share(job) * layers / s.layers if job.trained else psi
        spread = experts if job.expert > 1 else 0.0
        ends_whole = embedding * (of_embedding == 1) + head * (of_head == 1) + last * s.final_norm
        undivided = layers * whole_per_layer + ends_whole * whole
        found.append(Stage(place, last, layers, psi, trained, spread, embedding, head, undivided))
    return found


def vocabulary_divisors(job: Job) -> tuple[int, int]:
    """Over how many ranks of a tensor group (embedding, head) are divided.

    Transformers' plans divide both. Of two that are one, train.py's own division leaves both whole (engines/tensor.py); AutoTP
    divides that one, unless there are adapters (loop/deepspeed_engine.py), and leaves an embedding of its own whole (deepspeed
    0.19.8, module_inject/tp_plan_converter.py).
    """
    t, auto, tied = job.tensor, job.deepspeed, job.shape.tied
    if not job.ours:
        return t, t
    if tied:
        return (t, t) if auto and job.method == "full" else (1, 1)
    return (1 if auto else t), t


def logits_divisor(job: Job) -> int:
    """Over how many ranks logits stay divided: train.py gathers them, AutoTP not those of a head that is the embedding."""
    return job.tensor if not job.ours or (job.deepspeed and job.shape.tied and job.method == "full") else 1


def adapter_share(job: Job) -> float:
    """What share of adapters one rank of a tensor group has. Of an adapter's two matrices the one that has the divided side of
    its base is divided: B where the base's outputs are, A where its inputs are (Megatron divides both alike)."""
    if not (job.ours and job.tensor > 1):
        return 1 / job.tensor
    whole = cut = 0
    for moe, count in job.shape.kinds:
        for reads, inner, outer in linears(job.shape, job.targets, moe=moe):
            by_input = reads in ("attention", "activation")
            whole, cut = whole + count * (outer if by_input else inner), cut + count * (inner if by_input else outer)
    return (whole + cut / job.tensor) / (whole + cut)


def expert_divisor(job: Job) -> int:
    """Over how many ranks of a stage one copy of the experts is spread: tensor parallelism cuts each, unless expert parallelism
    needs its ranks as well. train.py's tensor groups leave each expert whole."""
    together = job.expert <= job.data * job.context and not experts_whole(job)
    return job.expert * (job.tensor if together else 1)


def same_experts(job: Job) -> tuple[int, int]:
    """(ranks that shard one copy of the same experts, all ranks of a stage that hold them) under expert parallelism."""
    of_stage = job.data * job.context * job.tensor
    holders = max(1, of_stage // expert_divisor(job))
    if not job.ours:
        return min(job.shard_ranks, holders), holders
    # Groups of neighbours, of any axis, within a copy of all else.
    return shards(job.expert, of_stage if job.pipeline > 1 else job.shard_ranks * job.tensor), holders


def experts_whole(job: Job) -> bool:
    """Whether a tensor group divides the tokens of experts, and not their matrices."""
    return job.ours and job.expert > 1


def gathered_bytes(job: Job, psi: float) -> float:
    """Of `psi` parameters as they are gathered or moved: in half precision, but QLoRA's."""
    return frozen_bytes(job, psi) if job.method == "qlora" else job.conventions.gathered * psi


def frozen_bytes(job: Job, psi: float) -> float:
    """The weights under adapters: bf16, or in linear layers four bits with nested constants (QLoRA).

    Experts are no linear layers since Transformers 5: it holds those of a layer in one 3D parameter, and gives bitsandbytes
    nn.Linear alone (transformers 5.23, integrations/bitsandbytes.py: replace_with_bnb_linear).
    """
    if job.method == "full":
        return 0.0
    if job.method == "lora":
        return 2 * psi
    s = job.shape
    experts = 0 if job.linear_experts else s.moe_layers * s.experts * s.expert
    whole = (s.embedding + s.head + experts) / job.tensor / job.pipeline
    return 2 * whole + (NF4_CUT if job.ours and job.tensor > 1 else NF4) * (psi - whole)
