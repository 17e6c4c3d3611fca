"""Variables that libraries read once, when they are imported or when CUDA starts: set later they have no effect, and nothing
says so. A run sets them before anything else, and nothing that it imports for that imports torch.

What only DeepSpeed and data loading read is set by step/environment.py, which is still before them. Brigade sets no variable of
NCCL's (read when the group is made), of TORCH_NCCL_* and TORCH_FR_* (when a process group is), nor CUBLAS_WORKSPACE_CONFIG and
CUDA_DEVICE_MAX_CONNECTIONS (when CUDA starts): those of the shell are there from the beginning.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from ..host.cluster import World
from . import torch_build

# Of torch's allocator, which reads them when CUDA starts (c10/cuda/CUDAAllocatorConfig.h). The first is for all kinds of devices.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
KERNEL = Path("/proc/sys/kernel/osrelease")  # 5.15.167.4-microsoft-standard-WSL2 for instance


def set_variables(world: World) -> None:
    """Set what is read once.

    - Sequences without padding have another length in each step, and fixed blocks of memory become fragments.
    - One progress bar is enough for a download, and none for what `datasets` does in a moment (their modules constants and
      config are executed once).
    """
    torch = sys.modules.get("torch")
    # Who calls train.main from Python may have used a GPU.
    has_started = torch is not None and torch.cuda.is_initialized()
    if not any(name in os.environ for name in ALLOCATOR) and not has_started and has_segments_that_grow():
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    if not world.is_main_rank:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def has_segments_that_grow() -> bool:
    """Whether memory can be mapped into a segment that is there: not in WSL2, where the first allocation fails under drivers
    before 615 (pytorch#192330), and not under ROCm, where nobody has tried it here."""
    with suppress(OSError):
        if "microsoft" in KERNEL.read_text().lower():
            return False
    return torch_build.read().hip is None


def allocator_setting() -> str:
    """Return `NAME=VALUE` of what is set for torch's allocator, or ""."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ), "")
