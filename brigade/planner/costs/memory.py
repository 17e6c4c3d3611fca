"""Peak memory of a rank, in parts, by formula. Bytes.

A step has four moments at which memory can be highest: at the loss, when all layers' activations and the logits are there; in
the first layers of the backward pass, when the logits are gone and gradients have begun; in the last of them, when all
gradients are there; and in the optimizer's step, with what that needs and no activation. The peak is the largest of them, over
the stages of a pipeline.
"""

import math
from dataclasses import dataclass, fields

from ..choice.job import Job
from ..models.adapter_costs import NORM_STANDS, adapter_bytes, norm_weights
from ..models.layer import back_bytes, keeps_input, kept_bytes, layer_ops
from ..models.traced_activations import Traced
from .states import FOREACH, OPTIMIZER_BYTES, SUB_GROUP_SIZE, StateBytesPerRank, model_states

GIB = 2**30
# Bytes per token and word of the vocabulary at the loss.
# full: where the caller holds its outputs, bf16 logits (2), and log-softmax (4), the gradient that comes in (4) and its own (4):
#   transformers/loss/loss_utils.py; released: without the logits, as Trainer lets them go before the backward pass (traced 12)
# compiled: the fp32 copy is never made whole, its gradient replaces log-softmax (12 in a torchtune run with and without)
# online: compiled by torch 2.8 and later: one pass over bf16 logits each way, and their gradient (tests/unit/test_estimate.py)
# kernel: bf16 logits and their gradient, by one kernel (Megatron's vocabulary-parallel cross-entropy, flash-attn's)
# chunked: bf16 logits, and of one chunk of eight the rest; fused: neither (Liger, cut cross-entropy)
# parallel: of logits that tensor parallelism divides, log-softmax, the gradient as it is filled, exp and their sum, 4 each
#   (torch/distributed/tensor/parallel/loss.py: _nll_loss_and_log_softmax_backward)
LOGIT_BYTES = {
    "full": 14.0,
    "released": 12.0,
    "compiled": 12.0,
    "online": 4.0,
    "kernel": 4.0,
    "chunked": 3.0,
    "fused": 0.0,
    "parallel": 16.0,
}
FUSED_LOSS_BYTES = 57_000  # per token, of Liger's fused linear cross-entropy
RECOMPUTED = frozenset(("scores",))  # what checkpointing of attention alone computes again
BUCKET = 5 * 10**8  # elements of DeepSpeed's reduction bucket by default
NF4 = 0.516  # bytes of a weight in four bits, with nested constants of its blocks of 64 (arXiv 2305.14314, section 3)
LIVE = 10**9  # elements that ZeRO-3 keeps gathered by default (stage3_max_live_parameters)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its peak.

    buffers: gathered layers, reduction buckets, half-precision copies
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated would say."""
        return sum(getattr(self, part.name) for part in fields(self))


def stage_layers(job: Job) -> list[int]:
    """How many layers each pipeline stage has.

    Evenly, or by cost (nanotron): blocks go to a stage until it has its share of the cost, of which the head has as much as its
    product weighs against a layer's.
    """
    s, p = job.shape, job.pipeline
    if p == 1:
        return [s.layers]
    if not job.conventions.cut_by_cost:
        return [s.layers // p + (stage < s.layers % p) for stage in range(p)]
    share, counts, cost = (s.layers * s.layer_matmul + s.vocab * s.hidden) / p, [0], 0.0
    for _ in range(s.layers):
        if cost >= share * len(counts) and len(counts) < p:
            counts.append(0)
        counts[-1] += 1
        cost += s.layer_matmul
    return counts + [0] * (p - len(counts))


def stage_parameters(job: Job, layers: int, *, first: bool, last: bool) -> float:
    """Of one rank before data-parallel sharding: a pipeline stage's, over tensor and expert parallelism."""
    s = job.shape
    per_layer = (s.dense_layers * s.dense_layer + s.moe_layers * s.moe_base) / s.layers
    head = s.head or (0 if first else s.vocab * s.hidden)  # a tied head is a copy on the last stage
    ends = first * s.embedding + last * (head + s.final_norm)
    return (layers * per_layer + ends) / job.tensor + first * s.other + expert_parameters(job, layers)


def expert_divisor(job: Job) -> int:
    """Over how many ranks of a stage one copy of the experts is spread: tensor parallelism cuts each, unless expert parallelism
    needs its ranks as well."""
    return job.expert * (job.tensor if job.expert <= job.data * job.context else 1)


def expert_parameters(job: Job, layers: int) -> float:
    """Of the experts of `layers` layers, on one rank before data-parallel sharding."""
    s = job.shape
    return layers / s.layers * s.moe_layers * s.experts * s.expert / expert_divisor(job)


def micro_batches_in_flight(job: Job, place: int) -> float:
    """Of how many micro-batches the stage at `place` keeps activations, under 1F1B.

    Interleaved, a stage holds chunks of its layers, of each micro-batch one after the other: 2 (p - 1) + (v - 1) p + 1 of them on
    the first (Megatron-LM's warm-up; Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / p v).
    """
    p, v = job.pipeline, job.virtual
    if v == 1:
        return min(p - place, job.accumulation)
    return min(2 * (p - 1 - place) + (v - 1) * p + 1, v * job.accumulation) / v


def activation_bytes(job: Job) -> tuple[float, float]:
    """(what one layer keeps, mean over layers; what the backward pass of a layer needs besides) per micro-batch.

    With checkpointing a layer keeps what it begins with, and what it computes again comes to what it needs.
    """
    s, t = job.shape, job.tokens
    without = RECOMPUTED if job.checkpointing == "attention" else frozenset()
    whole = back = 0.0
    for moe, count in ((False, s.dense_layers), (True, s.moe_layers)):
        if count:
            ops = list(
                layer_ops(
                    s,
                    job.kernels,
                    job.attention,
                    job.scored,
                    moe=moe,
                    repeat_kv=job.repeat_kv,
                    dropout=job.dropout,
                    autocast=job.autocast,
                )
            )
            kept = kept_bytes(ops, job.tensor, job.sequence_parallel, job.conventions.keep_gathered, without)
            whole += kept * t * count / s.layers
            back = max(back, back_bytes(ops, job.tensor, job.sequence_parallel) * t)
    whole += adapters_keep(job)
    boundary = (4 if job.autocast else 2) * s.hidden * t / (job.tensor if job.sequence_parallel else 1)
    if job.checkpointing == "full":
        kept = boundary / job.every + whole * (1 - 1 / job.every)
        shared = boundary if keeps_input(s, job.kernels, job.autocast) else 0.0  # which the layer begins with as well
        return (0.0 if job.offload_activations else kept), whole - shared + back
    if job.checkpointing == "half":  # keeps every other product's output and attention's
        return (4 * s.hidden + 2 * (s.query_width + s.key_value_width) + 2 * s.ffn) * t / job.tensor, whole / 2 + back
    return whole, back


def adapters_keep(job: Job) -> float:
    """What a layer keeps more, mean over layers, with frozen weights and adapters; neither a trace nor layer_ops() has it."""
    s = job.shape
    if job.method == "full":
        return 0.0
    counts = ((False, s.dense_layers), (True, s.moe_layers))
    more = (
        count
        * adapter_bytes(
            s, job.kernels, job.targets, moe=moe, copies=job.adapter_copies, dropout=job.adapter_dropout, dora=job.dora
        )
        for moe, count in counts
    )
    return sum(more) * job.tokens / s.layers / job.tensor


def norm_bytes(job: Job) -> float:
    """What stands while DoRA takes the norm of the largest weight's rows; one in four bits is dequantised for it."""
    if not job.dora:
        return 0.0
    counts = ((False, job.shape.dense_layers), (True, job.shape.moe_layers))
    weights = [w for moe, count in counts if count for w in norm_weights(job.shape, job.targets, moe=moe)]
    return (NORM_STANDS[job.adapter_copies] + 2 * (job.method == "qlora")) * max(weights, default=0) / job.tensor


def logit_bytes(job: Job) -> float:
    """Of final norm, logits and loss at their peak, per micro-batch."""
    norm = 2 if "norm" in job.kernels or job.shape.family.layer_norm else 6  # bytes of its input, as in a layer
    if job.loss == "fused":  # besides what the norm gives
        return (FUSED_LOSS_BYTES * job.labelled + (norm + 2) * job.shape.hidden) * job.tokens
    norm_bytes = norm * job.shape.hidden * job.tokens / (job.tensor if job.sequence_parallel else 1)
    loss: str = job.loss
    if job.tensor > 1 and job.engine == "fsdp2":
        loss = "parallel"
        norm_bytes += 2 * job.shape.hidden * job.tokens  # gathered for the head
    return norm_bytes + LOGIT_BYTES[loss] * job.tokens * job.labelled * job.shape.vocab / job.tensor


def held_states(job: Job) -> StateBytesPerRank:
    """What one rank holds of the model in the optimizer's step. Without pipeline and tensor parallelism."""
    psi = job.shape.parameters
    return _states(job, job.trained or psi, frozen_bytes(job, psi))[0]


def moments(job: Job, traced: Traced | None = None) -> list[Memory]:
    """Of every stage; activations and logits by formula, or as `traced` on one rank that holds every layer."""
    return [moment for place, count in enumerate(stage_layers(job)) for moment in _moments(job, place, count, traced)]


def memory(job: Job, traced: Traced | None = None) -> Memory:
    """The fullest rank at its peak."""
    return max(moments(job, traced), key=lambda moment: moment.allocated)


def _moments(job: Job, place: int, layers: int, traced: Traced | None) -> list[Memory]:
    """The four moments of one pipeline stage."""
    engine, s = job.conventions, job.shape
    first, last = place == 0, place == job.pipeline - 1
    psi = stage_parameters(job, layers, first=first, last=last)
    trained = job.trained / job.tensor / job.pipeline if job.trained else psi
    experts = expert_parameters(job, layers) if job.expert > 1 else 0.0
    states, held = _states(job, trained, frozen_bytes(job, psi), experts)
    kept, back = activation_bytes(job)
    kept *= layers * micro_batches_in_flight(job, place)
    logits = logit_bytes(job) if last else 0.0
    if traced:
        more, again = adapters_keep(job), job.checkpointing == "full"
        kept, back = traced.kept + more * layers * (not again), traced.back + more * again
        logits = traced.loss if job.loss == "released" else logits
    back += norm_bytes(job)
    buffers = _buffers(job, psi, first=first, last=last)
    begun = 0.0 if job.step_in_backward else held
    waiting = held if engine.held or job.accumulation > 1 else 0.0
    head = 0.0
    # The first gradient that the backward pass makes is whole until it is reduced; FSDP2's is among its buffers.
    if last and not waiting and job.method == "full" and job.stage < 2:
        head = engine.gradients * s.vocab * s.hidden / job.tensor
    elif job.engine == "zero" and job.method == "full" and job.data > 1:
        head = 2 * s.vocab * s.hidden
    ends = (last * s.vocab + first * s.vocab * (not s.tied or not last)) * s.hidden / job.tensor
    first_made = (psi - ends) / max(layers, 1) + last * s.vocab * s.hidden / job.tensor  # of a layer, and of the head
    made = min(1.0, first_made / max(psi, 1.0))
    weights, optimizer = states.parameters, states.optimizer
    roots = _roots(job, optimizer) if job.optimizer in FOREACH and not job.step_in_backward else 0.0
    at_step = 0.0 if job.step_in_backward else states.gradients
    last_layer, standing = back if job.checkpointing == "full" else 0.0, buffers if job.stage < 3 else 0.0
    return [
        Memory(weights, waiting + head, optimizer, kept, logits, buffers),
        Memory(weights, waiting or begun * made, optimizer, kept + back, 0.0, buffers),
        Memory(weights, max(at_step, begun), optimizer, last_layer, 0.0, standing),
        Memory(
            weights, at_step, optimizer + roots, 0.0, 0.0, standing - 2 * psi * job.autocast
        ),  # casts go with the pass
    ]


def _roots(job: Job, optimizer: float) -> float:
    """Bytes of the copy that torch's foreach kernels make of second moments; `optimizer` are those of all its states.

    DeepSpeed steps its fp32 master copy, under ZeRO-3 a sub-group of it at a time.
    """
    if job.engine == "zero":
        return min(optimizer / 3, 4 * SUB_GROUP_SIZE if job.stage == 3 else math.inf)
    return optimizer / 2 if job.engine in ("ddp", "fsdp2", "fsdp-bf16", "pure") else 0.0


def _states(job: Job, trained: float, frozen: float, experts: float = 0.0) -> tuple[StateBytesPerRank, float]:
    """(what one rank holds in the optimizer's step, its gradients until then).

    experts: parameters among them that expert parallelism has divided, so that fewer ranks are left to share their states
    """
    if not experts:
        return _shared_states(job, trained, frozen, job.shard_ranks)
    copies = max(1, min(job.shard_ranks, job.data * job.context * job.tensor // expert_divisor(job)))
    full = job.method == "full"
    dense, held = _shared_states(job, trained - experts * full, frozen - 2 * experts * (not full), job.shard_ranks)
    theirs, held_too = _shared_states(job, experts * full, 2 * experts * (not full), copies)
    both = (getattr(dense, part.name) + getattr(theirs, part.name) for part in fields(dense))
    return StateBytesPerRank(*both), held + held_too


def _shared_states(job: Job, trained: float, frozen: float, n: int) -> tuple[StateBytesPerRank, float]:
    """_states of parameters of which `n` ranks hold one copy together."""
    engine, stage = job.conventions, job.stage
    if job.engine in ("ddp", "zero", "fsdp2"):
        kind = f"zero{stage}" if job.engine == "zero" else job.engine
        states = model_states(kind, round(trained), n, half=True, optim=job.optimizer, hpz=job.hpz, frozen=frozen)
        held = engine.gradients * trained / (n if stage >= 2 else 1)
        if job.offload:  # gradients go to the host as they come; "all" and "nvme" leave nothing but what is gathered
            weights = states.parameters if job.offload == "optimizer" else 0.0
            return StateBytesPerRank(weights, 0.0, 0.0), 0.0
        return states, held
    own = OPTIMIZER_BYTES[job.optimizer]
    moments = engine.optimizer if own == 8 else own
    shared = {at: n if stage >= at else 1 for at in (1, 2, 3)}
    weight = engine.weights * trained if job.method == "full" else 4 * trained + frozen
    held = engine.gradients * trained / shared[2]
    return StateBytesPerRank(weight / shared[3], held, moments * trained / shared[1]), held


def gradient_bytes(job: Job) -> float:
    """Of one rank until the optimizer's step, on the first stage of a pipeline."""
    layers = stage_layers(job)[0]
    psi = stage_parameters(job, layers, first=True, last=job.pipeline == 1)
    if job.trained:
        return _states(job, job.trained / job.tensor / job.pipeline, 0.0)[1]
    return _states(job, psi, 0.0, expert_parameters(job, layers) if job.expert > 1 else 0.0)[1]


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
    return 2 * whole + NF4 * (psi - whole)


def _buffers(job: Job, psi: float, *, first: bool, last: bool) -> float:
    """Gathered weights, reduction buckets and half-precision copies that stand at the peak."""
    s, t = job.shape, job.tensor
    if job.stage >= 3 and job.engine == "zero":
        return 2 * max(min(LIVE, psi), s.vocab * s.hidden) + 2 * 2 * s.hidden**2
    if job.stage >= 3:
        # Two layers gathered in bf16, one's gradients in bf16 and fp32, and the root's embedding and head, which stay gathered.
        # Stages of a pipeline stay gathered for all micro-batches, and wait for the last one with their gradients whole, in fp32
        # (torchtitan's reshard_after_forward "default"; torch/distributed/pipelining/stage.py: set_requires_gradient_sync).
        if job.pipeline > 1:
            return (2 + (0 if job.method != "full" else 4)) * psi
        ends = first * s.embedding + last * (s.head or (0 if first else s.vocab * s.hidden))
        weight, expert = (NF4, NF4 if job.linear_experts else 2) if job.method == "qlora" else (2, 2)
        layer = max(
            weight * s.dense_layer if s.dense_layers else 0,
            weight * s.moe_base + expert * s.experts * s.expert / job.expert if s.moe_layers else 0,
        )
        gradients = 3 * layer if job.method == "full" else 0  # in bf16 and in fp32, three times its weights in bf16
        return (2 * layer + gradients + 2 * ends) / t
    if job.engine == "zero" and job.data > 1:
        return 2.0 * BUCKET
    if job.engine == "ddp" and job.method == "full":
        return 2 * psi + (4 * psi if job.data > 1 else 0)  # autocast's bf16 copies; DDP's buckets
    return 0.0
