"""Count what torch's caching allocator holds on a card with room; nvidia-smi shows CUDA's context and NCCL's buffers beside it.

A block that one kind of tensor leaves behind seldom fits another kind, and nothing is given back while there is room. So states,
gradients, and all that comes and goes in a step (activations, logits, gathered weights) lie side by side, each at its own most.
Where memory is short it gives its cache back: what is allocated stays, and gaps where activations lie between states.
"""

import functools

from ..constants import CONSTANTS
from .job import Job
from .layer import exchanged_width
from .memory import Memory, moments, stream_pool
from .states import first_stage_states


def reserved_with_room(job: Job) -> float:
    """Return the bytes of torch.cuda.max_memory_reserved, as if a card had room for all of them."""
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
