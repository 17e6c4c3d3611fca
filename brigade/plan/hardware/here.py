"""The GPU of this process, with the memory that the device itself reports.

A name does not tell the memory: a laptop's card, a part of a card (MIG, vGPU) and a new one are not in the catalogue, and an
RTX 4090 may have 48 GB.
"""

from dataclasses import replace

import torch

from ...train.host import control_groups
from . import Gpu, catalogue, gpu, gpu_of_device

GIB = 2**30


def gpu_here() -> Gpu | None:
    """Return the GPU of this process, None without one.

    Where the catalogue does not know its name, the rates are those of the kind with the nearest number of multiprocessors. They
    put ways into an order, and are no estimate of its time: who estimates one asks gpu_of_device(). A GPU without memory of its
    own (GB10, Jetson) has what this process already holds of the host's, and what is left there.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = gpu_of_device(device.name) or gpu(_nearest(device.multi_processor_count))
    integrated = bool(device.is_integrated)
    memory: int = device.total_memory
    if integrated:  # CUDA counts all of the host's memory
        memory = min(memory, torch.cuda.memory_reserved() + control_groups.memory_left()["available"])
    return replace(known, memory_gib=memory / GIB, integrated=integrated)


def _nearest(multiprocessors: int) -> str:
    entries = catalogue()
    return min(entries, key=lambda kind: abs(entries[kind]["sms"] - multiprocessors))
