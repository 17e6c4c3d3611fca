"""Count what torch's caching allocator holds on a card with room, for tables that measured this and not what was allocated.

A block that one kind of tensor leaves behind seldom fits another kind, and nothing is given back while there is room. So states,
gradients, and all that comes and goes in a step (activations, logits, gathered weights) lie side by side, each at its own most.
"""

import re
from collections.abc import Mapping

from brigade.plan.costs.estimate import Estimate, factors
from brigade.plan.costs.layer import exchanged_width
from brigade.plan.costs.memory import GIB, moments, stream_pool
from brigade.plan.costs.states import first_stage_states

from .formulas import moving_bytes
from .job import PublishedJob
from .parse_columns import told

OTHER_PROGRAMS = (
    "other programs"  # of intervals.yaml: programs as they were first seen (benchmarks/planner_intervals.py)
)
ON_A_CARD_WITH_ROOM = 3  # times what ZeRO-3's streams hold at least (stream_pool): pools_at_most's runs


def reserved_gib(result: Estimate) -> float:
    """Return torch.cuda.max_memory_reserved in GiB, at most what the card has."""
    most = result.gpu.memory_gib - result.context / GIB
    return max(result.allocated_gib, min(_wanted_gib(result), most))


def verdict(result: Estimate, row: Mapping[str, str]) -> str:
    """Return whether the run of that row fits: "yes" at the upper end of the memory's interval, too; "maybe" where the expected
    figure does; else "no". Blocks of CUDA graphs are only theirs and never given back, so all reserved has to be there
    (torch/cuda/graphs.py: graph_pool_handle)."""
    if re.search(r"cuda.?graphs?\b", told(row, "kernels", "notes")):
        may_fit = _wanted_gib(result) + result.context / GIB <= result.gpu.memory_gib
    else:
        may_fit = result.may_fit
    _, high = factors("memory", OTHER_PROGRAMS)
    fits = result.fits and high * result.allocated_gib + result.context / GIB <= result.gpu.memory_gib
    return "no" if not may_fit else "yes" if fits else "maybe"


def _wanted_gib(result: Estimate) -> float:
    job, found = result.job, moments(result.job)
    assert isinstance(job, PublishedJob)
    per_stage = [found[start : start + 4] for start in range(0, len(found), 4)]
    # What DeepSpeed copies for a step is one block, and takes those that activations have left (ms-swift); torch's own are many,
    # and do not (qwen). A stage's first moment has none.
    copied = [[one.optimizer - stage[0].optimizer for one in stage] for stage in per_stage]
    states = max(
        stage[0].weights + stage[0].optimizer + max(more) * (not job.deepspeed)
        for stage, more in zip(per_stage, copied, strict=True)
    )
    gradients = max(first_stage_states(job)[1], *(one.gradients for one in found))
    moving = max(
        moving_bytes(one) + more * job.deepspeed
        for stage, steps in zip(per_stage, copied, strict=True)
        for one, more in zip(stage, steps, strict=True)
    )
    engine = job.conventions
    pools = ON_A_CARD_WITH_ROOM * stream_pool(job) + _exchanged(job)
    return (states + gradients + (engine.fragmentation + engine.streams) * moving + pools) / GIB


def _exchanged(job: PublishedJob) -> float:
    """Return the bytes that Ulysses' exchanges receive in one pass through a layer.

    NCCL's stream marks them as used (record_stream of torch.distributed's collectives), so no block is free before the GPU has
    come that far, and Python is seconds ahead of it. Read off four runs of 70B and 32B over 32 and 64 H100s (arctic-training).
    """
    return 2 * exchanged_width(job) * job.tokens if job.ulysses and job.context > 1 else 0.0
