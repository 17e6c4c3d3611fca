"""Torch's records of what its allocator on a GPU holds, for https://pytorch.org/memory_viz (torch/cuda/memory.py), and how it is
set up.

`torch.cuda.memory_snapshot` is public, but returns segments alone, which that page does not read.
"""

from pathlib import Path

import torch


def record(entries: int = 100_000) -> bool:
    """Keep the Python lines of the last so many allocations, for a snapshot to show. Return whether this torch can."""
    try:
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")
    except (AttributeError, RuntimeError):  # a build or an allocator without it
        return False
    return True


def has_expandable_segments() -> bool:
    """Whether the allocator takes memory in segments that grow: what it has read, whatever the environment says by now."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def write(file: Path) -> bool:
    """Write what is allocated now. Return whether there was a GPU whose allocator could tell."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.memory._dump_snapshot(str(file))
    except (AttributeError, RuntimeError, OSError):
        # another allocator, a broken context, a full disk: the error itself is told
        return False
    return True
