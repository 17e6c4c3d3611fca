"""What a planner of three textbook formulas says of the same runs: bytes per parameter, activations, one MFU per chip."""

import statistics
from functools import cache

from brigade.plan.costs.memory import GIB

from .planner_intervals import Group, grouped
from .planner_rows import Run, runs, strangers
from .planner_tables import textbook, trivial
from .published.table import counts_allocated

PER_LAYER = (
    34  # bytes per token and element of the hidden size that a layer keeps (Korthikanti et al. 2022, arXiv 2205.05198)
)
KEPT = 2  # the same of a layer that is computed again: its input
PER_LOGIT = 6  # bytes, in bf16 and fp32
ON_THE_CARD = 2.0  # GiB that CUDA and NCCL take


def memory_error(run: Run) -> float:
    """Return predicted over measured memory."""
    job, s = run.job, run.job.shape
    width = job.tokens * s.hidden / job.tensor
    layers = s.layers / job.pipeline
    again = job.checkpointing == "full"
    activations = width * (layers * KEPT + PER_LAYER if again else layers * PER_LAYER)
    logits = PER_LOGIT * job.tokens * s.vocab / job.tensor
    found = textbook(run) + (activations + logits) / GIB + (0.0 if counts_allocated(run.row) else ON_THE_CARD)
    return found / (run.memory or 0.0)


@cache
def _others(source: str) -> list[Run]:
    return [run for run in runs() if run.source != source and run.speed and run.healthy]


def speed_error(run: Run) -> float:
    """Return predicted over measured speed, by the median MFU that other sources' runs had on the chip."""
    return trivial(run, _others(run.source))


@cache
def group(what: str) -> Group:
    """Return all runs as one group, whose interval is made as the planner's are. what: "memory", "device" or "time" """
    known = [*runs(), *strangers()]
    if what == "time":
        fast = [run for run in known if run.speed and run.healthy and not run.job.fp8]
        return grouped([(run, 1 / speed_error(run)) for run in fast])
    held = [run for run in known if run.memory and run.says_what]
    return grouped([(run, memory_error(run)) for run in held if counts_allocated(run.row) == (what == "memory")])


def spread(errors: list[float]) -> str:
    """Return `16.2%, 41.0%`: median and p90 of |predicted / measured - 1|."""
    off = sorted(100 * abs(error - 1) for error in errors)
    return f"{statistics.median(off):.1f}%, {off[min(len(off) - 1, int(0.9 * len(off)))]:.1f}%"
