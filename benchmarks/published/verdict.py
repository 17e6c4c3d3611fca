"""Say whether a published run fits, by its estimate and by what its program does with memory."""

import re
from collections.abc import Mapping

from brigade.plan.costs.estimate import Estimate, factors
from brigade.plan.costs.memory import GIB, reserved_with_room

from .parse_columns import told

OTHER_PROGRAMS = (
    "other programs"  # of intervals.yaml: programs as they were first seen (benchmarks/planner_intervals.py)
)


def verdict(result: Estimate, row: Mapping[str, str]) -> str:
    """Return whether the run of that row fits: "yes" at the upper end of the memory's interval, too; "maybe" where the expected
    figure does; else "no". Blocks of CUDA graphs are only theirs and never given back, so all reserved has to be there
    (torch/cuda/graphs.py: graph_pool_handle)."""
    if re.search(r"cuda.?graphs?\b", told(row, "kernels", "notes")):
        may_fit = (reserved_with_room(result.job) + result.context) / GIB <= result.gpu.memory_gib
    else:
        may_fit = result.may_fit
    _, high = factors("memory", OTHER_PROGRAMS)
    fits = result.fits and high * result.allocated_gib + result.context / GIB <= result.gpu.memory_gib
    return "no" if not may_fit else "yes" if fits else "maybe"
