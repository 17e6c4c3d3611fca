"""The process before any engine is imported: its environment, and what it prints."""

import io
import logging
import os
import sys
import warnings
from typing import TextIO

from .. import upstream
from ..distributed import devices, ranks
from ..host import cpu_threads, freed_memory
from ..host.cluster import OWN_NUMBER, World
from ..strategy import Strategy
from ..upstream import deepspeed_kernels as kernels

# DeepSpeed wants both alike (runtime/engine.py: _configure_with_arguments).
DEVICE = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


def prepare_environment(world: World, strategy: Strategy) -> None:
    """Set what the engines read from the environment, once and before any of them is imported. The device may be in use by then:
    what CUDA reads is set by distributed/read_once.py.

    - DeepSpeed asks for MPI when a lone process names no rank; FSDP and ZeRO on one process need a group of one.
    - A lock in the cache of compiled kernels that a killed run left behind would hold this one up for ever.
    - DeepSpeed asks several times what the CPU can do, and an answer takes a second.
    - A rank that sees only its own GPU has number 0 for it, whatever its number on the host: DeepSpeed and accelerate take
      LOCAL_RANK for the device.
    """
    import torch

    clear_accelerate_variables()
    devices.keep_fp32()
    if strategy.is_deepspeed:
        kernels.find()
        kernels.end_locks_with_their_holder()
        kernels.ask_cpu_once()
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
    device = devices.index(world)
    if device is not None and device != world.local_rank:
        os.environ[OWN_NUMBER] = str(world.local_rank)
        os.environ.update({name: str(device) for name in DEVICE if name in os.environ})
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns, whatever the strategy: accelerate imports it
        freed_memory.keep()
    _silence(world)


def clear_accelerate_variables() -> None:
    """Take accelerate's variables out of this process: Strategy holds what they said, and train.py passes it on
    explicitly. Left in place they would be read a second time, by other rules (`--deepspeed` or environment?)."""
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[key]


def _silence(world: World) -> None:
    """Hide what is known to be noise, and no more. Every other rank's number precedes what it prints, logs or warns about."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # It warns that its own accumulation setting, which Trainer keeps at 1, is not DeepSpeed's.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not world.is_main_rank:
        _mark_as(world.rank)


class _Marked(io.TextIOBase):
    """Writes whole lines to `stream`, each after a mark, except empty ones."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self.stream, self.mark, self.begun = stream, mark, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            if line.strip():
                self.stream.write(f"{self.mark}{line}\n")
        return len(text)

    def flush(self) -> None:
        if self.begun:
            self.write("\n")
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


def _mark_as(rank: int) -> None:
    """Mark this process's output: whatever it prints, logs or warns about from now on begins with its rank."""
    mark = f"rank {rank}: "
    if not isinstance(sys.stdout, _Marked):
        sys.stdout = _Marked(sys.stdout, mark)
    formatted = warnings.formatwarning
    if not formatted("", UserWarning, "", 0).startswith(mark):  # nor by an earlier run
        warnings.formatwarning = lambda *args, **options: mark + formatted(*args, **options)
        record = logging.getLogRecordFactory()

        def marked(*args: object, **options: object) -> logging.LogRecord:
            one = record(*args, **options)
            one.msg = f"{mark}{one.msg}"
            return one

        logging.setLogRecordFactory(marked)
