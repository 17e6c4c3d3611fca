"""Count the peak memory of a rank, in parts. Bytes.

A step has four moments at which memory can be highest: at the loss, when all layers' activations and the logits are there; in
the first layers of the backward pass, when the logits are gone and gradients have begun; in the last of them, when all
gradients are there; and in the optimizer's step, with what that needs and no activation. The peak is the largest of them, over
the stages of a pipeline. A second model beside the trained one has a moment of its own, its forward pass before the step. Passes
of the trained model without gradients have none: they keep no layer's activations, and the pass with gradients needs more.
"""

import functools
from dataclasses import dataclass, replace

from ..constants import CONSTANTS
from .activations import activation_bytes, logit_bytes, micro_batches_in_flight, tower_bytes, whole_weight_bytes
from .comparing import reference_job, reference_weights
from .division import SUB_GROUP_SIZE, Stage, division, first_stage_states, own_bytes, stage_states, stages
from .job import VISION_TOWER, Job
from .layer import exchanged_width

GIB = 2**30


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
    def allocated(self) -> float:
        """Bytes that torch.cuda.max_memory_allocated would say."""
        return sum(vars(self).values())


def stream_pool(job: Job) -> float:
    """Return the bytes that ZeRO-3's streams hold besides: no stream takes a block that another one has left.

    Runs of published tables reserved three times as much where a card had room, and one with 0.7 GiB to spare ran out of memory.
    """
    pooled = job.deepspeed and job.stage == 3 and job.shard_ranks > 1
    return 2 * min(CONSTANTS.live, job.shape.parameters) if pooled else 0.0


@functools.singledispatch
def moments(job: Job) -> list[Memory]:
    """Return the four moments of every stage, and that of a second model."""
    layer = activation_bytes(job)
    weights = reference_weights(job) if job.comparison.stays else 0.0
    of_stages = [
        moment
        for stage in stages(job)
        for moment in _moments(job, stage, *layer, weights if stage.last else 0.0)  # where the loss is
    ]
    if job.comparison.second:
        of_stages.append(_reference_moment(job))
    if job.images:
        of_stages.append(_tower_moment(job))
    return of_stages


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
    engine, stage, second = job.conventions, stages(job)[-1], reference_job(job)
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


def _moments(job: Job, stage: Stage, kept: float, back: float, reference: float) -> list[Memory]:
    """Return the four moments of one pipeline stage. kept, back: as activation_bytes(job) gives them"""
    engine, psi, last = job.conventions, stage.parameters, stage.last
    states, held = stage_states(job, stage)
    kept *= stage.layers * micro_batches_in_flight(job, stage.place)
    logits = logit_bytes(job) if last else 0.0
    back += whole_weight_bytes(job)
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
    at_step_pass = whole_pass - 2 * psi * job.autocast  # autocast's copies go with the backward pass
    return [
        Memory(weights, waiting + head, optimizer, kept, logits, standing, reference),
        Memory(weights, waiting or held * made, optimizer, kept + back, 0.0, standing, reference),
        Memory(weights, max(at_step, held), optimizer, last_layer + seen, 0.0, whole_pass, reference),
        Memory(weights, at_step, optimizer + _roots(job, optimizer), 0.0, 0.0, at_step_pass, reference),
    ]


def _roots(job: Job, optimizer: float) -> float:
    """Return the bytes of the copies that come and go while the optimizer steps. optimizer: bytes of all its states

    Torch's foreach kernels take the square root of all second moments at once (torch/optim/adam.py: _multi_tensor_adam;
    train/step/schedule_free.py).

    Ten bytes per parameter where weights, gradients and moments have eight (Mistral 7B and Llama 3 8B in bf16:
    benchmarks/data/collected.csv, fms-acceleration). DeepSpeed steps its fp32 master copy, under ZeRO-3 a sub-group at a time,
    after it has laid the gradients end to end and copied them to fp32 (stage3.py: _prepare_fp32_grad_for_sub_group).
    """
    foreach = job.optimizer in ("adamw_torch", "schedule_free_adamw")
    if job.deepspeed and not job.offload:
        stepped = optimizer / (4 + own_bytes(job))
        stepped = min(stepped, SUB_GROUP_SIZE) if job.stage == 3 else stepped
        return stepped * max(4 * foreach, 2)
    return optimizer / 2 * foreach


@functools.singledispatch
def buffers(job: Job, stage: Stage) -> float:
    """Return the bytes of gathered weights, reduction buckets and half-precision copies that stand at the peak."""
    s, full, psi = job.shape, job.method == "full", stage.parameters
    if job.stage >= 3 and job.deepspeed:
        # All experts of a layer are one parameter (Transformers 5), gathered whole; its gradient is whole until it is reduced.
        together, widest = s.experts * s.expert, max(s.hidden * max(s.vocab, s.ffn, s.query_width), s.looked_up)
        return 2 * max(min(CONSTANTS.live, psi), widest, together) + 2 * 2 * s.hidden**2 + 2 * together * full
    if job.stage >= 3:
        # Two layers gathered in bf16, one's gradients in bf16 and fp32, and the root's embedding and head, which stay gathered.
        weight = CONSTANTS.nf4_bytes if job.method == "qlora" else 2
        dense = weight * s.dense_layer / job.tensor if s.dense_layers else 0
        experts = 2 * s.experts * s.expert / job.expert / (1 if division(job).whole_experts else job.tensor)
        moe = weight * s.moe_base / job.tensor + experts if s.moe_layers else 0
        layer = max(dense, moe)
        gradients = 3 * layer if full else 0  # in bf16 and in fp32, three times its weights in bf16
        # A tower's layers, smaller than the decoder's, are gathered one by one too; what lies around them belongs to the root.
        tower = job.images.tower if job.images else None
        around = tower.parameters + tower.projector - tower.shape.layers * tower.shape.dense_layer if tower else 0
        return 2 * layer + gradients + 2 * (stage.embedding + stage.head + around)
    if job.deepspeed and job.data > 1:
        return 2.0 * CONSTANTS.deepspeed_bucket
    if job.engine == "stages" and full:
        # Autocast makes its copies anew in each micro-batch, and the backward pass reads them, unless it computes layers again.
        copies = 1 if job.checkpointing == "full" else micro_batches_in_flight(job, stage.place)
        return 2 * psi * copies
    if job.engine == "ddp" and full:
        return 2 * psi + (4 * psi if job.data > 1 else 0)  # autocast's bf16 copies; DDP's buckets
    return 0.0


def reserved_with_room(job: Job) -> float:
    """Return the bytes of torch.cuda.max_memory_reserved, as if a card had room for all of them.

    A block that one kind of tensor leaves behind seldom fits another kind, and nothing is given back while there is room. So
    states, gradients, and all that comes and goes in a step (activations, logits, gathered weights) lie side by side, each at its
    own most. Where memory is short the allocator gives its cache back: what is allocated stays, and gaps() do.
    """
    found = moments(job)
    per_stage = [found[start : start + 4] for start in range(0, len(found), 4)]
    # What DeepSpeed copies for a step is one block, and takes those that activations have left (ms-swift); torch's own are many,
    # and do not (qwen). A stage's first moment has none.
    copied = [[one.optimizer - stage[0].optimizer for one in stage] for stage in per_stage]
    states = max(
        max(one.weights + one.reference for one in stage) + stage[0].optimizer + max(more) * (not job.deepspeed)
        for stage, more in zip(per_stage, copied, strict=True)
    )
    gradients = max(first_stage_states(job)[1], *(one.gradients for one in found))
    moving = max(
        moving_bytes(one) + more * job.deepspeed
        for stage, steps in zip(per_stage, copied, strict=True)
        for one, more in zip(stage, steps, strict=True)
    )
    pools = CONSTANTS.pools_with_room * stream_pool(job) + marked_bytes(job)
    return states + gradients + moving_share(job) * moving + pools


@functools.singledispatch
def gaps(job: Job, peak: Memory) -> float:
    """Return the bytes between the tensors of a moment that stay where memory is short."""
    return CONSTANTS.short * (CONSTANTS.fragmentation - 1) * peak.allocated if peak.activations else 0.0


def moving_bytes(peak: Memory) -> float:
    """Return the bytes that come and go in a step."""
    return peak.activations + peak.logits + peak.buffers


@functools.singledispatch
def moving_share(job: Job) -> float:
    """Return what is reserved for all that comes and goes in a step, of the most of it that is there at once."""
    return CONSTANTS.fragmentation


@functools.singledispatch
def marked_bytes(job: Job) -> float:
    """Return the bytes that Ulysses' exchanges receive in one pass through a layer.

    NCCL's stream marks them as used (record_stream of torch.distributed's collectives), so no block is free before the GPU has
    come that far, and Python is seconds ahead of it. Read off four runs of 70B and 32B over 32 and 64 H100s (arctic-training).
    """
    return 2 * exchanged_width(job) * job.tokens / job.tensor if job.context > 1 else 0.0
