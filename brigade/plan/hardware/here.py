"""The GPU of this process, with the memory that the device itself reports.

A name does not tell the memory: a laptop's card, a part of a card (MIG, vGPU) and a new one are not in the catalogue, and an
RTX 4090 may have 48 GB.
"""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...train import control_groups
from . import Gpu, catalogue, gpu, gpu_of_device

MEMINFO = Path("/proc/meminfo")
GIB = 2**30


def gpu_here() -> Gpu | None:
    """Return the GPU of this process, None without one.

    Where the catalogue does not know its name, the rates are those of the kind with the nearest number of multiprocessors. They
    put ways into an order, and are no estimate of its time: who estimates one asks gpu_of_device().
    """
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = gpu_of_device(device.name) or gpu(_nearest(device.multi_processor_count))
    integrated = bool(device.is_integrated)
    memory = _of_the_host(device) if integrated else device.total_memory
    return replace(known, memory_gib=memory / GIB, integrated=integrated)


def _nearest(multiprocessors: int) -> str:
    entries = catalogue()
    return min(entries, key=lambda kind: abs(entries[kind]["sms"] - multiprocessors))


def _of_the_host(device: Any) -> int:
    """Return the bytes that a GPU may use which has no memory of its own (GB10, Jetson): what this process already has there, and
    what the host has left. CUDA counts all of the host's memory, and as free what files do not occupy for the moment."""
    most: int = min(device.total_memory, control_groups.memory())
    with suppress(OSError, ValueError):
        (left,) = re.findall(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text(), re.M)
        most = min(most, torch.cuda.memory_reserved() + int(left) * 1024)
    return most
