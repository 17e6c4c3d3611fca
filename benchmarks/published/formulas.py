"""Count what a PublishedJob costs: terms of other engines, registered beside the planner's formulas for train.py's.

Each function is registered with the planner's function of that name, for which train.py's is `own`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from brigade.plan.constants import CONSTANTS
from brigade.plan.costs import activations, communication, estimate, layer, memory, step_time
from brigade.plan.costs.communication import Shared, sharding_seconds, tensor_seconds, ulysses_seconds
from brigade.plan.costs.conventions import LOGIT_BYTES
from brigade.plan.costs.division import Division, Stage, division, frozen_bytes
from brigade.plan.costs.job import Job
from brigade.plan.costs.memory import Memory
from brigade.plan.costs.mixer import Op
from brigade.plan.hardware import Gpu, gpu
from brigade.plan.hardware.network import Links

from .job import PublishedJob

# Times as fast as bf16, of dense products and of those of many experts: read off published rows.
FP8 = {"row": 1.0, "tensor": 1.4}
FP8_OF_MEGATRON, FP8_GROUPED = 2.4, 2.2
# What samples of varying length leave in torch's allocator, in times what comes and goes: the median of padded runs
# (benchmarks/varying.py).
VARYING = 0.9


def own(function: Any) -> Any:
    """Return the planner's formula for a job of train.py."""
    return function.dispatch(Job)


# ---- whom it is compared with ------------------------------------------------------------------------------------
@estimate.product_flops.register
def _(job: PublishedJob, device: Gpu) -> float:
    return math.inf if job.fp8 else float(own(estimate.product_flops)(job, device))


@estimate.time_group.register
def _(job: PublishedJob, device: Gpu) -> str:
    return "FP8" if job.fp8 else str(own(estimate.time_group)(replace(job, engine=family(job)), device))


def family(job: PublishedJob) -> str:
    """Return the engine whose published runs are like these, or that of one card and whole copies."""
    name = job.conventions.family or job.engine
    if name != "fsdp2" or (job.stage and job.gpus > 1):
        return name
    return "ddp" if job.tensor * job.pipeline == 1 else "stages"


# ---- how a model is divided --------------------------------------------------------------------------------------
class EvenDivision(Division):
    """How Megatron, torchtitan and nanotron divide a model: evenly, and all of it."""

    job: PublishedJob
    whole_norms = False
    whole_experts = False

    @property
    def ends(self) -> tuple[int, int]:
        return self.job.tensor, self.job.tensor

    @property
    def logits(self) -> int:
        return self.job.tensor

    @property
    def adapters(self) -> float:
        return 1 / self.job.tensor

    @property
    def expert_stride(self) -> int:
        return self.job.tensor

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has: evenly, or by cost, where nanotron fills one stage after the other up to its share."""
        shape, p = self.job.shape, self.job.pipeline
        if not self.job.conventions.cut_by_cost:
            return [shape.layers // p + (stage < shape.layers % p) for stage in range(p)]
        share, counts, cost = (shape.layers * shape.layer_matmul + shape.vocab * shape.hidden) / p, [0], 0.0
        for _ in range(shape.layers):
            if cost >= share * len(counts) and len(counts) < p:
                counts.append(0)
            counts[-1] += 1
            cost += shape.layer_matmul
        return counts + [0] * (p - len(counts))

    @property
    def same_experts(self) -> tuple[int, int]:
        holders = max(1, self.job.data * self.job.context * self.job.tensor // self.experts)
        return min(self.job.shard_ranks, holders), holders


@division.register
def _(job: PublishedJob) -> Division:
    return EvenDivision(job)


@frozen_bytes.register
def _(job: PublishedJob, psi: float) -> float:
    if job.method != "qlora":
        return float(own(frozen_bytes)(job, psi)) * (2 if job.fp32_base else 1)
    whole = _never_in_four_bits(job)
    return (4 if job.fp32_base else 2) * whole + CONSTANTS.nf4_bytes * (psi - whole)


def _never_in_four_bits(job: PublishedJob) -> float:
    s = job.shape
    experts = 0 if job.linear_experts else s.moe_layers * s.experts * s.expert
    return (s.embedding + s.head + experts) / job.tensor / job.pipeline


# ---- memory ------------------------------------------------------------------------------------------------------
@layer.layer_ops.register
def _(job: PublishedJob, moe: bool) -> Iterator[Op]:
    ops = list(own(layer.layer_ops)(job, moe))
    if job.conventions.keep_gathered and job.sequence_parallel and job.tensor > 1:
        # What norms give is gathered before a product, and kept whole.
        given = sum(op.kept for op in ops if op.name in ("norm0 out", "norm1 out"))
        yield Op("gathered", "pointwise", kept=given * (1 - 1 / job.tensor), split=False)
    for op in ops:
        if op.name == "exchange" and not job.ulysses:
            continue
        if job.dropout and op.name == "residual":
            op = replace(op, kept=2 * job.shape.hidden)
        if job.dropout and op.name == "scores":  # their mask and what it leaves: Korthikanti et al. 2022, section 4.1
            scores, kept = job.shape.heads * job.scored, 3 if "softmax" in job.kernels else 1
            op = replace(
                op, moved=op.moved + 3 * scores, moved_back=op.moved_back + 4.5 * scores, kept=op.kept + kept * scores
            )
        yield replace(op, split=op.split or job.sequence_parallel)


@activations.activation_bytes.register
def _(job: PublishedJob) -> tuple[float, float]:
    kept, back = own(activations.activation_bytes)(job)
    if job.checkpointing == "half":  # keeps every other product's output and attention's
        s, whole = job.shape, kept
        inner = 0 if s.experts and "experts" in job.kernels else 2 * s.ffn  # compiled experts keep none
        kept = (4 * s.hidden + 2 * (s.query_width + s.key_value_width) + inner) * job.tokens / job.tensor
        # And what an all-to-all brought (torchtitan/distributed/activation_checkpoint.py: _op_sac_save_list).
        kept += 2 * s.hidden * s.top_k * job.tokens * s.moe_layers / s.layers * (job.expert > 1)
        return kept, max(0.0, whole - kept) + back
    if job.checkpointing != "full":
        return kept, back
    whole = (4 if job.autocast else 2) * job.shape.hidden * job.tokens  # what a layer begins with
    part = whole / job.norm_ranks
    shared = job.one_kernel_norm or job.autocast
    kept, back = kept - (whole - part) / job.every, back + (whole - part) * shared
    if job.offload_activations:  # the layer's input comes back, and its output's gradient takes no other's place
        return 0.0, back + part * (1 + shared)
    return kept, back


@activations.logit_bytes.register
def _(job: PublishedJob) -> float:
    if job.tensor == 1 or job.loss == "fused":
        return float(own(activations.logit_bytes)(job))
    s, t, loss = job.shape, job.tokens, job.loss
    final_norm = (2 if job.one_kernel_norm else 6) * s.hidden * t / job.norm_ranks
    if job.engine == "fsdp2":
        loss, final_norm = "parallel", final_norm + 2 * s.hidden * t  # gathered for the head
    parts = 1 if loss == "half" else job.tensor
    return final_norm + LOGIT_BYTES[loss] * t * job.labelled * s.vocab / parts


@memory.moments.register
def _(job: PublishedJob) -> list[Memory]:
    found: list[Memory] = own(memory.moments)(job)
    engine = job.conventions
    if job.step_in_backward:
        waits = engine.held or job.accumulation > 1
        for at in range(0, len(found), 4):
            loss, first, last, step = found[at : at + 4]
            found[at + 1] = first if waits else replace(first, gradients=0.0)
            found[at + 2] = replace(last, gradients=0.0)
            found[at + 3] = replace(step, gradients=0.0, optimizer=loss.optimizer)
    if engine.holds_inputs and job.method != "full" and job.checkpointing == "full":
        for at in range(0, len(found), 4):
            loss, _, last, step = found[at : at + 4]
            found[at + 2] = replace(last, activations=last.activations + 2 * loss.activations, buffers=loss.buffers)
            found[at + 3] = replace(step, buffers=loss.buffers)
    return found


@memory.buffers.register
def _(job: PublishedJob, stage: Stage) -> float:
    s, full, engine = job.shape, job.method == "full", job.conventions
    if job.stage >= 3 and not job.deepspeed and job.pipeline > 1:
        # Stages stay gathered for all micro-batches, and wait for the last one with their gradients whole, in fp32 (torchtitan's
        # reshard_after_forward "default"; torch/distributed/pipelining/stage.py: set_requires_gradient_sync).
        return (6 if full else 2) * stage.parameters
    if job.engine.startswith("fsdp") and job.stage == 2:  # reshard_after_forward: false; SHARD_GRAD_OP
        return 2 * stage.parameters + (6 if full else 2) * max(s.dense_layer, s.moe_layer)
    found = float(own(memory.buffers)(job, stage))
    if job.fp32_base:
        # Autocast keeps no copy of a weight that has no gradient (ATen/autocast_mode.cpp: cached_cast), so each product's 16-bit
        # copy stays with what the product keeps for the backward pass: of a layer that is computed again, or of all.
        layers = stage.parameters - stage.embedding
        layer = layers / (max(stage.layers, 1) if job.checkpointing == "full" else 1)
        found += 2 * (stage.head if job.method == "qlora" else layer)
    if job.stage >= 2 and job.accumulation > 1 and full:
        found += job.whole_gradients * stage.parameters
    if engine.listed and job.stage >= 3:
        found += 2 * s.hidden * max(s.vocab, s.ffn, s.query_width)
    if engine.dummies and full and job.stage < 3:
        found += 2 * ((s.moe_base + s.expert if s.moe_layers else s.dense_layer) / job.tensor + stage.head)
    if job.linear_experts and job.method == "qlora" and job.stage >= 3 and not job.deepspeed:
        found -= 2 * (2 - CONSTANTS.nf4_bytes) * s.experts * s.expert / job.expert / job.tensor
    return found


@memory.gaps.register
def _(job: PublishedJob, peak: Memory) -> float:
    engine = job.conventions
    between = (engine.fragmentation - 1) * peak.allocated + engine.streams * memory.moving_bytes(peak)
    return CONSTANTS.short * between if peak.activations else 0.0


@memory.moving_share.register
def _(job: PublishedJob) -> float:
    return job.conventions.fragmentation + job.conventions.streams


@memory.marked_bytes.register
def _(job: PublishedJob) -> float:
    moving = max(map(memory.moving_bytes, memory.moments(job)))
    # Blocks of shorter samples do not fit a longer one.
    left = VARYING * moving if job.varying else 0.0
    if job.fp32_base and job.method == "qlora":
        # The 16-bit weights that prepare_model_for_kbit_training has cast to fp32 leave their blocks to what comes and goes.
        return left + max(0.0, 2 * _never_in_four_bits(job) - moving)
    return left + (float(own(memory.marked_bytes)(job)) if job.ulysses else 0.0)


# ---- time --------------------------------------------------------------------------------------------------------
@step_time.op_seconds.register
def _(job: PublishedJob, g: Gpu, op: Op) -> tuple[float, float]:
    if job.fp8 and op.kind == "product":
        dense = FP8_OF_MEGATRON if job.driver == "megatron" else FP8[job.fp8]
        faster = FP8_GROUPED if op.experts / job.expert > 1 else dense
        g = replace(g, sustained=g.sustained * faster)
    forward, backward = own(step_time.op_seconds)(job, g, op)
    return forward, backward


@step_time.waiting_seconds.register
def _(job: PublishedJob, again: float, busy: float) -> float:
    longer = job.conventions.host_layers
    return float(longer * own(step_time.waiting_seconds)(job, again, busy / longer))


@communication.between_layers.register
def _(job: PublishedJob, net: Links, again: bool) -> float:
    engine = job.conventions
    more = 2 * (job.sequence_parallel and not engine.keep_gathered)  # gathered again for the weights' gradients
    seconds = tensor_seconds(job, net, more) * (1 - engine.tensor_hidden)
    if job.context > 1:
        seconds += ulysses_seconds(job, net, again) if job.ulysses else _ring(job, net, again)
    if job.expert > 1:  # a token goes once to a node on which it has several experts (DeepEP), and once back
        tokens = 2 * job.shape.hidden * job.tokens * job.shape.top_k
        seconds += 4 * net.half(tokens, job.expert, job.tensor) * job.shape.moe_layers / job.shape.layers
    return seconds


def _ring(job: PublishedJob, net: Links, again: bool) -> float:
    """Return the seconds per layer and micro-batch of context parallelism that attention does not hide.

    Keys and values go round the ring, forward (and when that is computed again) and backward, there with their gradients (ring
    attention, arXiv 2310.01889; torch/distributed/tensor/experimental/_context_parallel).
    """
    s = job.shape
    around = net.half(2 * s.key_value_width * job.tokens * job.context / job.tensor, job.context, job.tensor)
    rate = gpu(job.gpu).attention_rate(job.attention)
    forward = 4 * s.query_width * job.scored / 2 * job.tokens / job.tensor / rate
    return (1 + again) * max(0.0, around - forward) + max(0.0, 2 * around - 2.5 * forward)


@communication.border_seconds.register
def _(job: PublishedJob, net: Links) -> float:
    """Megatron's tensor ranks send a part each and gather (Narayanan et al. 2021, section 4.1)."""
    return float(own(communication.border_seconds)(job, net, job.tensor))


@communication.data_seconds.register
def _(job: PublishedJob, net: Links, forward: float, backward: float, stage: Stage) -> float:
    if job.stage < 3 or job.conventions.gathers_hidden:
        return float(own(communication.data_seconds)(job, net, forward, backward, stage))
    m, (gather, scatter, across) = job.accumulation, sharding_seconds(job, net, stage)
    exposed = m * (2 * gather + scatter) + max(0.0, across - max(0.0, backward))
    return exposed + CONSTANTS.contention * m * min(across / m, forward + backward)


@communication.gather_seconds.register
def _(job: PublishedJob, net: Links, part: Shared, calls: float) -> float:
    calls = 9 * job.shape.layers / job.pipeline if job.conventions.per_tensor else calls
    return float(own(communication.gather_seconds)(job, net, part, calls))
