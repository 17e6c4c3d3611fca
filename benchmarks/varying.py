"""What torch's allocator keeps in runs whose samples vary in length (data/varying.csv).

Each row has what is allocated at rest and at the peak, and what nvidia-smi shows, so no length of a sample is needed: what is
shown beyond the peak and CUDA's context is divided by what comes and goes in a step, the peak without what is allocated at rest.
"""

import statistics
from collections import defaultdict

from brigade.plan.constants import CONSTANTS
from brigade.plan.costs.estimate import context_bytes
from brigade.plan.costs.memory import GIB

from .pages import markdown, read
from .planner_rows import DATA

PADDINGS = {"batch": "to the longest of a batch", "none": "none", "multipack": "none, batches of about as many tokens"}


def kept(padding: str) -> dict[tuple[str, int], list[float]]:
    """Return what each run with that padding keeps beyond its peak, by its task and its GPUs."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in read(DATA / "varying.csv"):
        if row["padding"] == padding and row["peak_gib"]:
            gpus = int(row["n_gpus"])
            rest, peak, shown = (float(row[f"{what}_gib"]) for what in ("rest", "peak", "shown"))
            found[row["task"], gpus].append((shown - context_bytes(gpus) / GIB - peak) / (peak - rest))
    return found


def beyond_fragmentation() -> float:
    """Return the median of padded runs, without what the allocator keeps of samples of one length, too."""
    every = [value for values in kept("batch").values() for value in values]
    return statistics.median(every) - (CONSTANTS.fragmentation - 1)


def table() -> str:
    lines = [
        [task, gpus, said, len(of), *(f"{figure:.2f}" for figure in (min(of), statistics.median(of), max(of)))]
        for padding, said in PADDINGS.items()
        for (task, gpus), of in sorted(kept(padding).items())
    ]
    return markdown(["task", "GPUs", "padding", "runs", "least", "median", "most"], lines)
