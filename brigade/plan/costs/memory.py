"""Count the peak memory of a rank, in parts. Bytes.

A step has four moments at which memory can be highest: at the loss, when all layers' activations and the logits are there; in
the first layers of the backward pass, when the logits are gone and gradients have begun; in the last of them, when all
gradients are there; and in the optimizer's step, with what that needs and no activation. The peak is the largest of them, over
the stages of a pipeline. A second model beside the trained one has a moment of its own, its forward pass before the step. Passes
of the trained model without gradients have none: they keep no layer's activations, and the pass with gradients needs more.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

from ..shape.lora import all_linears
from ..shape.trace_settings import Trace, TraceSettings
from .adapters import NORM_STANDS, adapter_bytes
from .comparing import reference_job, reference_weights
from .conventions import LOGIT_BYTES
from .division import division
from .job import PROJECTOR, VISION_TOWER, Job
from .layer import NORM_BACK, layer_ops
from .stages import NF4, Stage, stages
from .states import SUB_GROUP_SIZE, stage_states
from .tower import pixel_bytes, projector_bytes, tower_job

GIB = 2**30
TILE = 2**26  # logits that stand at once where the loss is computed in tiles (train/parallel/tiled.py)
FUSED_LOSS_BYTES = 57_000  # per token, of Liger's fused linear cross-entropy
BUCKET = 5 * 10**8  # elements of DeepSpeed's reduction bucket by default
LIVE = 10**9  # elements that ZeRO-3 keeps gathered by default (stage3_max_live_parameters)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its peak.

    buffers: gathered layers, reduction buckets, half-precision copies
    reference: weights of a second model, with which answers are compared
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reference: float = 0.0

    @property
    def moving(self) -> float:
        """Bytes that come and go in a step."""
        return self.activations + self.logits + self.buffers

    @property
    def allocated(self) -> float:
        """Bytes that torch.cuda.max_memory_allocated would say."""
        return sum(vars(self).values())


def stream_pool(job: Job) -> float:
    """Return the bytes that ZeRO-3's streams hold besides: no stream takes a block that another one has left.

    Runs of published tables reserved three times as much where a card had room, and one with 0.7 GiB to spare ran out of memory.
    """
    return 2 * min(LIVE, job.shape.parameters) if job.deepspeed and job.stage == 3 and job.shard_ranks > 1 else 0.0


def settings_of(job: Job) -> TraceSettings | None:
    """Return the trace that stands for a job's memory; None where the job splits or recomputes layers as no trace does."""
    split = job.tensor * job.pipeline * job.context * job.expert > 1
    split = split or job.shape.scores or job.comparison.apart > 1 or job.inputs_on_host
    if split or job.checkpointing not in ("none", "full") or job.every > 1:
        return None
    attention: Literal["eager", "flash2"] = "eager" if job.attention == "eager" else "flash2"
    return TraceSettings(job.sequence, job.autocast, job.checkpointing == "full", attention, job.kernels)


def micro_batches_in_flight(job: Job, place: int) -> float:
    """Return how many micro-batches the stage at `place` keeps activations of, under 1F1B.

    Interleaved, a stage holds chunks of its layers, of each micro-batch one after the other: 2 (p - 1) + (v - 1) p + 1 of them on
    the first (Megatron-LM's warm-up; Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / p v).
    """
    p, v = job.pipeline, job.virtual
    if job.order.keeps_all:
        return job.accumulation
    if v == 1:
        return min(p - place, job.accumulation)
    return min(2 * (p - 1 - place) + (v - 1) * p + 1, v * job.accumulation) / v


def layer_bytes(job: Job, moe: bool) -> tuple[float, float]:
    """Return the bytes per token (that one rank keeps of a layer, that the layer's backward pass needs at its peak beyond them).

    What an operation kept is free when its gradients are there, so that a need late in the pass finds room.
    """
    kept = freed = peak = inside = 0.0
    tile = min(1.0, job.shape.hidden / job.tokens)  # share of the tokens that a tile has (train/parallel/tiled.py)
    pairs = [(op, job.tensor if op.split else 1) for op in layer_ops(job, moe)]
    for op, parts in pairs:
        if op.tiled:
            inside += op.kept * op.share / parts
        elif not (job.checkpointing == "attention" and op.name == "scores"):  # which are computed again
            kept += op.kept * op.share / parts
    for op, parts in reversed(pairs):
        needs = tile * (inside + op.back / parts) if op.tiled else op.back / parts
        peak = max(peak, needs - freed)
        freed += 0.0 if op.tiled else op.kept * op.share / parts
    return kept, peak


@functools.singledispatch
def activation_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes per micro-batch (that one layer keeps, mean over layers; that a layer's backward pass needs besides).

    With checkpointing a layer keeps what it begins with, and what it computes again comes to what it needs.
    """
    s, t = job.shape, job.tokens
    whole = back = largest = 0.0
    for moe, count in s.kinds:
        kept, needed = layer_bytes(job, moe)
        whole += kept * t * count / s.layers
        back, largest = max(back, needed * t), max(largest, kept * t)
    whole += adapters_keep(job)
    largest += adapters_keep(job)
    for one in s.one_of_each:
        kept, needed = layer_bytes(replace(job, shape=one), moe=False)
        back, largest = max(back, needed * t), max(largest, kept * t + adapters_keep(job))
    if s.sizes:
        largest = max(layer_bytes(one, s.moe_layers > 0)[0] * t + adapters_keep(one) for one, _ in job.alike)
    # Each layer's part of a second embedding is made before the layers: its norm's input, normalised, and the result.
    before = (10 if job.method == "full" else 6) * s.per_layer_input * t
    boundary = input_bytes(job)
    if job.checkpointing == "full":
        kept = (0.0 if job.inputs_on_host else boundary) / job.every + whole * (1 - 1 / job.every)
        # What the first norm keeps is what the layer begins with, or an fp32 copy of it. From the host it comes back.
        shared = boundary if job.one_kernel_norm or job.autocast else 0.0
        return kept + before, largest - shared + boundary * job.inputs_on_host + back
    if job.checkpointing == "selective":
        kept = boundary + selectively_kept(job) * t / job.tensor
        return kept + before, max(0.0, largest - kept) + back
    if job.checkpointing == "half":  # keeps every other product's output and attention's
        inner = 0 if s.experts and "experts" in job.kernels else 2 * s.ffn  # compiled experts keep none
        kept = (4 * s.hidden + 2 * (s.query_width + s.key_value_width) + inner) * t / job.tensor
        # And what an all-to-all brought (torchtitan/distributed/activation_checkpoint.py: _op_sac_save_list).
        kept += 2 * s.hidden * s.top_k * t * s.moe_layers / s.layers * (job.expert > 1)
        return kept + before, max(0.0, whole - kept) + back
    return whole + before, back


def input_bytes(job: Job) -> float:
    """Return the bytes that a layer begins with, per micro-batch."""
    return (4 if job.autocast else 2) * job.shape.hidden * job.tokens


def inputs_on_host(job: Job) -> float:
    """Return the bytes of host memory in which a rank's layers have what they begin with, until they are computed again.

    torch rounds each page-locked block up to a power of two (c10, CachingHostAllocator.h).
    """
    if not job.inputs_on_host:
        return 0.0
    each = 2 ** math.ceil(math.log2(input_bytes(job)))
    return max(each * stage.layers * micro_batches_in_flight(job, stage.place) for stage in stages(job))


def selectively_kept(job: Job) -> float:
    """Return the bytes per token that a layer keeps besides what it begins with: every second product's output, the first among
    them, and what attention gives (train/loop/recomputing.py: kept_contexts)."""
    s = job.shape
    into = [s.query_width + s.key_value_width] if s.family.fused_qkv else [s.query_width, *[s.key_value_width / 2] * 2]
    up = [s.ffn] * 2 if s.family.gated and not s.family.fused_gate else [s.ffn * (1 + s.family.gated)]
    kept = [*into, s.hidden, *up, s.hidden][::2]
    return 2 * sum(kept) + 2 * s.query_width + 4 * s.heads


def adapters_keep(job: Job) -> float:
    """Return the bytes that adapters and frozen weights add to a layer, mean over layers; no trace nor layer_ops() has them."""
    if job.method == "full":
        return 0.0
    more = sum(count * adapter_bytes(job, moe) for moe, count in job.shape.kinds)
    return more * job.tokens / job.shape.layers / job.tensor


def norm_bytes(job: Job) -> float:
    """Return the bytes that stand while DoRA takes the norm of the largest weight's rows; four bits are dequantised for it."""
    if not job.dora:
        return 0.0
    largest = max((inner * outer for count, inner, outer in all_linears(job.shape, job.targets) if count), default=0)
    return (NORM_STANDS[job.adapter_copies] + 2 * (job.method == "qlora")) * largest / job.tensor


@functools.singledispatch
def logit_bytes(job: Job) -> float:
    """Return the bytes of final norm, logits and loss at their peak, per micro-batch."""
    s, t, loss = job.shape, job.tokens, job.loss
    norm = 2 if job.one_kernel_norm else 6  # bytes of its input, as in a layer
    if s.scores:  # of an answer's last token, one number
        return (norm + 2) * s.hidden * t
    capped = 2 * s.family.capped  # bytes of a logit that tanh keeps
    if loss == "fused":  # besides what the norm gives
        return (FUSED_LOSS_BYTES * job.labelled + (norm + 2) * s.hidden) * t
    final_norm = norm * s.hidden * t
    if loss == "tiled":  # the norm's result with its gradient and a tile's logits, or what the norm's way back needs
        tile = 4 * s.hidden * t + (LOGIT_BYTES["full"] + capped) * min(TILE, t * job.labelled * s.vocab)
        return final_norm + max(tile, 0.0 if job.one_kernel_norm else final_norm * NORM_BACK / norm)
    divisor = division(job).logits
    if divisor > 1:
        loss = "parallel"
        final_norm += 2 * s.hidden * t  # gathered for the head
    return final_norm + (LOGIT_BYTES[loss] + capped) * t * job.labelled * s.vocab / divisor


@functools.singledispatch
def moments(job: Job, traced: Trace | None = None) -> list[Memory]:
    """Return the four moments of every stage, and that of a second model.

    traced: activations and logits of a rank that holds all layers, else by formula
    """
    layer = activation_bytes(job)
    of_stages = [moment for stage in stages(job) for moment in _moments(job, stage, *layer, traced)]
    if job.comparison.stays:
        weights = reference_weights(job)
        of_stages = [replace(moment, reference=weights) for moment in of_stages]
    if job.comparison.second:
        of_stages.append(_reference_moment(job))
    if job.images:
        of_stages.append(_tower_moment(job))
    return of_stages


def tower_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes per micro-batch that images add (from forward to backward pass, at the peak of the tower's own pass).

    A frozen tower keeps its output only, for a projector that is trained; its layers come and go. The pixels stay in any case.
    """
    if not job.images:
        return 0.0, 0.0
    pixels, projected = pixel_bytes(job), projector_bytes(job)
    one_layer, back = tower_layer_bytes(job)
    if VISION_TOWER in job.images.trained:
        kept = pixels + projected + one_layer * job.images.tower.shape.layers
        return kept, kept + back
    kept = pixels + projected * (PROJECTOR in job.images.trained)
    return kept, pixels + max(one_layer, projected)


def tower_layer_bytes(job: Job) -> tuple[float, float]:
    """Return activation_bytes() of the vision tower, with what a layer keeps to train the vectors that scale its outputs."""
    assert job.images
    tower = tower_job(job)
    kept, back = activation_bytes(tower)
    more = 2 * job.images.tower.scales * tower.shape.hidden * tower.tokens * (tower.method == "full")
    return (kept, back + more) if tower.checkpointing == "full" else (kept + more, back)


def _tower_moment(job: Job) -> Memory:
    """Return the moment of the tower's own pass: forward where it is frozen, before the decoder keeps anything, and backward
    where it is trained, after the decoder's backward pass."""
    engine, stage = job.conventions, stages(job)[0]
    states, held = stage_states(job, stage)
    trains = job.images is not None and VISION_TOWER in job.images.trained
    gradients = max(states.gradients, held) if trains else held if engine.held or job.accumulation > 1 else 0.0
    return Memory(states.parameters, gradients, states.optimizer, tower_bytes(job)[1], 0.0, buffers(job, stage))


def _reference_moment(job: Job) -> Memory:
    """Return the moment of a second model's forward pass: one of its layers at a time, or its logits, stand beside the trained
    model's states. Without gradients they take at most what they take with them."""
    engine, (stage,), second = job.conventions, stages(job), reference_job(job)
    states, held = stage_states(job, stage)
    layer, logits = activation_bytes(second)[0], logit_bytes(second)
    layer, logits = (layer, 0.0) if layer > logits else (0.0, logits)
    (whole,) = stages(second)
    # FSDP2 gathers two layers and the two ends, in half precision: as many as with frozen weights under adapters.
    gathered = buffers(replace(second, method="lora"), whole) if second.stage else 0.0
    # What FSDP2 gathers of the trained model has gone with its last backward pass, and so have autocast's copies.
    own = buffers(job, stage) - 2 * stage.parameters * job.autocast if job.deepspeed or job.stage < 3 else 0.0
    gradients = held if engine.held else 0.0
    return Memory(states.parameters, gradients, states.optimizer, layer, logits, own + gathered, reference_weights(job))


def _moments(job: Job, stage: Stage, kept: float, back: float, traced: Trace | None) -> list[Memory]:
    """Return the four moments of one pipeline stage. kept, back: as activation_bytes(job) gives them"""
    engine, psi, last = job.conventions, stage.parameters, stage.last
    states, held = stage_states(job, stage)
    kept *= stage.layers * micro_batches_in_flight(job, stage.place)
    logits = logit_bytes(job) if last else 0.0
    if traced:
        more, again = adapters_keep(job), job.checkpointing == "full"
        kept, back = traced.kept + more * stage.layers * (not again), traced.back + more * again
        logits = traced.loss if job.loss == "released" else logits
    back += norm_bytes(job)
    seen = tower_bytes(job)[0]  # of images: it stands until the decoder's backward pass has ended
    kept += seen
    standing = buffers(job, stage)
    waiting = held if engine.held or job.accumulation > 1 else 0.0
    head, at_end = 0.0, stage.head or stage.embedding
    # The first gradient that the backward pass makes is whole until it is reduced; FSDP2's is among its buffers.
    if last and not waiting and job.method == "full" and job.stage < 2:
        head = engine.gradients * at_end
    elif job.deepspeed and job.method == "full" and job.data > 1:
        head = 2 * at_end
    between = psi - stage.embedding - stage.head
    first_made = between / max(stage.layers, 1) + last * at_end  # of a layer, and of the head
    made = min(1.0, first_made / max(psi, 1.0))
    weights, optimizer = states.parameters, states.optimizer
    at_step, whole_pass = states.gradients, standing if job.stage < 3 else 0.0
    last_layer = back if job.checkpointing in ("selective", "full") else 0.0
    return [
        Memory(weights, waiting + head, optimizer, kept, logits, standing),
        Memory(weights, waiting or held * made, optimizer, kept + back, 0.0, standing),
        Memory(weights, max(at_step, held), optimizer, last_layer + seen, 0.0, whole_pass),
        # Autocast's copies go with the backward pass.
        Memory(weights, at_step, optimizer + _roots(job, optimizer), 0.0, 0.0, whole_pass - 2 * psi * job.autocast),
    ]


def _roots(job: Job, optimizer: float) -> float:
    """Return the bytes of the copy of second moments that stands while torch's foreach kernels step.

    They take the square root of all at once (torch/optim/adam.py: _multi_tensor_adam; train/loop/schedule_free.py). optimizer:
    bytes of all its states

    Ten bytes per parameter where weights, gradients and moments have eight (Mistral 7B and Llama 3 8B in bf16:
    benchmarks/data/collected.csv, fms-acceleration). DeepSpeed steps its fp32 master copy, under ZeRO-3 a sub-group at a time.
    """
    if job.optimizer not in ("adamw_torch", "schedule_free_adamw"):
        return 0.0
    if job.deepspeed:
        return min(optimizer / 3, 4 * SUB_GROUP_SIZE if job.stage == 3 else math.inf)
    return optimizer / 2


@functools.singledispatch
def buffers(job: Job, stage: Stage) -> float:
    """Return the bytes of gathered weights, reduction buckets and half-precision copies that stand at the peak."""
    s, full, psi = job.shape, job.method == "full", stage.parameters
    if job.stage >= 3 and job.deepspeed:
        # All experts of a layer are one parameter (Transformers 5), gathered whole; its gradient is whole until it is reduced.
        together, widest = s.experts * s.expert, max(s.hidden * max(s.vocab, s.ffn, s.query_width), s.looked_up)
        return 2 * max(min(LIVE, psi), widest, together) + 2 * 2 * s.hidden**2 + 2 * together * full
    if job.stage >= 3:
        # Two layers gathered in bf16, one's gradients in bf16 and fp32, and the root's embedding and head, which stay gathered.
        weight = NF4 if job.method == "qlora" else 2
        dense = weight * s.dense_layer / job.tensor if s.dense_layers else 0
        experts = 2 * s.experts * s.expert / job.expert / (1 if division(job).whole_experts else job.tensor)
        moe = weight * s.moe_base / job.tensor + experts if s.moe_layers else 0
        layer = max(dense, moe)
        gradients = 3 * layer if full else 0  # in bf16 and in fp32, three times its weights in bf16
        # A tower's layers, smaller than the decoder's, are gathered one by one too; what lies around them belongs to the root.
        around = (
            job.images.tower.parameters + job.images.tower.projector - job.images.tower.in_layers if job.images else 0
        )
        return 2 * layer + gradients + 2 * (stage.embedding + stage.head + around)
    if job.deepspeed and job.data > 1:
        return 2.0 * BUCKET
    if job.engine == "stages" and full:
        # Autocast makes its copies anew in each micro-batch, and the backward pass reads them, unless it computes layers again.
        copies = 1 if job.checkpointing == "full" else micro_batches_in_flight(job, stage.place)
        return 2 * psi * copies
    if job.engine == "ddp" and full:
        return 2 * psi + (4 * psi if job.data > 1 else 0)  # autocast's bf16 copies; DDP's buckets
    return 0.0
