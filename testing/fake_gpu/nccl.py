"""ProcessGroupNCCL on the fake device, as torch.distributed makes it, and torch.cuda.nccl."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .native import native

VERSION = (2, 29, 7)


class _IsNCCL(type):
    def __instancecheck__(cls, backend: Any) -> bool:
        return isinstance(backend, native.NCCL)


class ProcessGroupNCCL(metaclass=_IsNCCL):
    class Options:
        def __init__(self, *_: Any, **__: Any):
            self._timeout: Any = None
            self.config = SimpleNamespace()

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        return native.NCCL(store, gloo)


def install() -> None:
    native.NCCL._set_default_timeout = lambda self, timeout: None
    native.NCCL._set_sequence_number_for_group = lambda self: None
    dist.distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment]
    dist.distributed_c10d._NCCL_AVAILABLE = True
    # NCCL's flight records, of torch's build for CUDA: here Gloo records what it does.
    vars(torch._C._distributed_c10d).pop("_dump_nccl_trace_json", None)
    module: Any = ModuleType("torch.cuda.nccl")
    module.version, module.is_available = lambda: VERSION, lambda tensors=None: True
    torch.cuda.nccl = sys.modules["torch.cuda.nccl"] = module
