"""The process before any engine is imported: its environment, and what it prints."""

import os
from contextlib import suppress
from pathlib import Path

from .. import cpu_threads, upstream
from ..cluster import OWN_NUMBER, World
from ..distributed import devices, ranks
from ..strategy import Strategy
from ..upstream import cpu_facts, locks
from ..upstream import deepspeed_kernels as kernels
from . import rank_marks

DEVICE = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")  # DeepSpeed wants both alike (runtime/engine.py:1960)
# Of torch's allocator; read at its first use (c10/cuda/CUDAAllocatorConfig.h:136). The first is for all kinds of devices.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
KERNEL = Path("/proc/sys/kernel/osrelease")  # 5.15.167.4-microsoft-standard-WSL2 for instance


def prepare_environment(world: World, strategy: Strategy) -> None:
    """Set what the engines read from the environment, once and before any of them is imported.

    - DeepSpeed asks for MPI when a lone process names no rank; FSDP and ZeRO on one process need a group of one.
    - A lock in the cache of compiled kernels that a killed run left behind would hold this one up for ever.
    - DeepSpeed asks several times what the CPU can do, and an answer takes a second.
    - A rank that sees only its own GPU has number 0 for it, whatever its number on the host: DeepSpeed and accelerate take
      LOCAL_RANK for the device.
    - Sequences without padding have another length in each step, and fixed blocks of memory become fragments.
    """
    import torch

    clear_accelerate_variables()
    if strategy.is_deepspeed:
        kernels.find()
        locks.end_with_their_holder()
        cpu_facts.ask_once()
    upstream.forget_earlier_run()
    # Else torch takes every core for every rank, or one where a launcher says so. accelerate looks at the variable.
    if not cpu_threads.is_chosen():
        torch.set_num_threads(cpu_threads.of_rank(world.local_size))
        os.environ[cpu_threads.VARIABLE] = str(torch.get_num_threads())
    if world.launcher == "python" and strategy.kind != "single":
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(ranks.free_port()),
        )
    if (device := devices.index(world)) is not None:
        if device != world.local_rank:
            os.environ[OWN_NUMBER] = str(world.local_rank)
            os.environ.update({name: str(device) for name in DEVICE if name in os.environ})
        if not any(name in os.environ for name in ALLOCATOR) and has_segments_that_grow():
            os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns, whatever the strategy: accelerate imports it
    _silence(world)


def has_segments_that_grow() -> bool:
    """Whether memory can be mapped into a segment that is there: not in WSL2, where the first allocation fails under drivers
    before 615 (pytorch#192330), and not under ROCm, where nobody has tried it here."""
    import torch

    with suppress(OSError):
        if "microsoft" in KERNEL.read_text().lower():
            return False
    return torch.version.hip is None


def clear_accelerate_variables() -> None:
    """Take accelerate's variables out of this process: Strategy holds what they said, and train.py passes it on
    explicitly. Left in place they would be read a second time, by other rules (`--deepspeed` or environment?)."""
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[key]


def _silence(world: World) -> None:
    """Hide what is known to be noise, and no more. What other ranks than the first print, log or warn of has their number."""
    import logging
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    # It warns that its own accumulation setting, which Trainer keeps at 1, is not DeepSpeed's.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if world.is_main_rank:
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    rank_marks.mark(world.rank)
