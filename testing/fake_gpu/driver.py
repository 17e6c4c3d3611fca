"""torch.cuda and torch.accelerator on the fake device: what torch's Python part asks of the CUDA runtime."""

import contextlib
import importlib
import os
import time
from types import SimpleNamespace
from typing import Any

import torch

from .native import native

# Name, compute capability, GiB of memory. A T4 has no bf16 of its own.
KINDS = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 80.0),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 23.5),
    "t4": ("Tesla T4", (7, 5), 14.6),
}
NAME, CAPABILITY, GIB = KINDS[os.environ.get("FAKE_GPU_KIND", "h100")]
MEMORY = int(GIB * 2**30)  # bytes
CUDA_VERSION = "13.0"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=MEMORY,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    is_integrated=0,
    gcnArchName="",
)
RANDOM_STATE_BYTES = 16  # of a CUDA generator: a seed and an offset


def properties(device: Any = None) -> SimpleNamespace:
    """Return a device's properties; its UUID is that of the host's GPU, whichever of them this process sees."""
    visible, index = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), index_of(device)
    number = int(visible[index]) if index < len(visible) and visible[index].strip().isdecimal() else index
    return SimpleNamespace(**vars(PROPERTIES), uuid=f"GPU-00000000-0000-0000-0000-{number:012}")


def index_of(device: Any = None) -> int:
    """Return a device's index; the current one's where it names none."""
    if device is None or isinstance(device, int):
        return native.current_device() if device is None else device
    named = torch.device(device)
    return native.current_device() if named.index is None else named.index


class Stream(torch.Stream):
    """The only stream of a device, in order with the host. What waits for it is counted by the device guard."""

    cuda_stream = 0
    priority = 0

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> "Stream":
        return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

    def is_capturing(self) -> bool:
        return False


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> "Event":
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        self.recorded = time.perf_counter()
        super().record(stream or Stream())

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds between two events; torch.Event's own takes no subclass."""
        return 1000 * (end_event.recorded - self.recorded)


class Device:
    """torch.cuda.device: the current device within a `with`."""

    def __init__(self, device: Any):
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = native.current_device()
        if self.index >= 0:
            native.set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        native.set_device(self.before)


class StreamContext:
    """torch.cuda.stream: a stream's device becomes the current one."""

    def __init__(self, stream: Any):
        self.device = Device(stream.device) if stream is not None else contextlib.nullcontext()

    def __enter__(self) -> None:
        self.device.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.device.__exit__(*raised)


def _set_device(device: Any) -> None:
    if (index := index_of(device)) >= 0:
        native.set_device(index)


def _exchange_device(index: int) -> int:
    before = native.current_device()
    if index >= 0:
        native.set_device(index)
    return before


def _synchronize(device: Any = None) -> None:
    native.wait("synchronize")


def _allocated(device: Any = None) -> int:
    return native.allocated_bytes()


def _peak(device: Any = None) -> int:
    return native.peak_bytes()


def _reset_peak(device: Any = None) -> None:
    native.reset_peak_bytes()


def _statistics(device: Any = None) -> dict[str, int]:
    return {
        "num_alloc_retries": 0,
        "allocated_bytes.all.current": _allocated(),
        "allocated_bytes.all.peak": _peak(),
        "reserved_bytes.all.current": _allocated(),
        "reserved_bytes.all.peak": _peak(),
    }


def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    settings = native.allocator_settings() or ""
    grow = {"expandable_segments": "expandable_segments:True" in settings}
    return {"segments": [], "device_traces": [], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings} | grow}


# Random numbers come from the host's generator, as the kernels do: a device has no state of its own to keep.
def _random_state(device: Any = "cuda") -> torch.Tensor:
    return torch.zeros(RANDOM_STATE_BYTES, dtype=torch.uint8)


def _nothing(*_: Any, **__: Any) -> None:
    """What a device without streams, caches and seeds has nothing to do for."""


CUDA = {
    "Stream": Stream,
    "Event": Event,
    "device": Device,
    "_DeviceGuard": Device,
    "device_of": lambda tensor: Device(tensor.device if tensor.is_cuda else -1),
    "stream": lambda stream: StreamContext(stream),
    "StreamContext": StreamContext,
    "is_available": lambda: native.device_count() > 0,
    "device_count": native.device_count,
    "_device_count_nvml": native.device_count,
    "current_device": native.current_device,
    "set_device": _set_device,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
    "init": native.start,
    "_lazy_init": native.start,
    "is_initialized": lambda: native.allocator_settings() is not None,
    "_is_compiled": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": properties,
    "get_arch_list": lambda: [f"sm_{major}{minor}" for _, (major, minor), _ in KINDS.values()],
    "is_bf16_supported": lambda including_emulation=True: including_emulation or CAPABILITY >= (8, 0),
    "can_device_access_peer": lambda device, peer: True,
    "synchronize": _synchronize,
    "current_stream": lambda device=None: Stream(device),
    "default_stream": lambda device=None: Stream(device),
    "set_stream": _nothing,
    "is_current_stream_capturing": lambda: False,
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "mem_get_info": lambda device=None: (MEMORY - native.allocated_bytes(), MEMORY),
    "memory_stats": _statistics,
    "_snapshot": _snapshot,
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _allocated),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _peak),
    **dict.fromkeys(
        ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), _reset_peak
    ),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"), _nothing),
    "initial_seed": lambda: 0,
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda: [_random_state()] * native.device_count(),
}  # fmt: skip
OF_BOTH = ("is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache", "memory_allocated",
           "max_memory_allocated", "memory_stats", "reset_peak_memory_stats")  # fmt: skip
ACCELERATOR = {
    **{name: CUDA[name] for name in OF_BOTH},
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": native.current_device,
    "current_device_idx": native.current_device,
    "set_device_index": _set_device,
    "set_device_idx": _set_device,
    "device_index": Device,
}
RUNTIME = {  # of torch._C
    "_cuda_getDeviceCount": native.device_count,
    "_cuda_getDevice": native.current_device,
    "_cuda_setDevice": native.set_device,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_maybeExchangeDevice": _exchange_device,
    "_cuda_getCurrentRawStream": lambda index: 0,
    "_cuda_isCurrentStreamCapturing": lambda: False,
    "_get_accelerator": lambda check=None: torch.device("cuda"),
}
TYPED_TENSORS = {
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
}


def install() -> None:
    """Put the device behind torch.cuda, torch.accelerator and what of torch._C they ask."""
    for owner, functions in ((torch.cuda, CUDA), (torch.accelerator, ACCELERATOR), (torch._C, RUNTIME)):
        for name, function in functions.items():
            setattr(owner, name, function if isinstance(function, type) else _of_its_own(function))
    for name in ("random", "memory", "streams"):  # which others import them from
        module = importlib.import_module(f"torch.cuda.{name}")
        for function in CUDA.keys() & vars(module).keys():
            setattr(module, function, getattr(torch.cuda, function))
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(importlib.import_module("torch.cuda.nvtx"), name, lambda *_, **__: 0)
    for name, dtype in TYPED_TENSORS.items():
        setattr(torch.cuda, name, _typed(dtype))
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(native.device_count()))
    torch.version.cuda = CUDA_VERSION
    torch._C._has_cudnn, torch.backends.cudnn.version = False, lambda: None
    torch.Tensor.cuda = _cuda  # type: ignore[method-assign,assignment]
    torch._TorchCompileInductorWrapper.__call__ = _compile  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    torch.UntypedStorage.to = _storage_to  # type: ignore[method-assign]


def _compile(_: Any, module: Any, inputs: Any) -> Any:
    """Stand in for inductor, which makes Triton kernels for a GPU: graphs and their gradients are traced as for it, and each
    operator runs by itself."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(module, inputs)


def _of_its_own(function: Any) -> Any:
    """Return a function for one name: Dynamo's tables refuse the same object under two."""
    return lambda *arguments, **named: function(*arguments, **named)


def _typed(dtype: torch.dtype) -> Any:
    def make(data: Any = (), *sizes: int) -> torch.Tensor:
        if isinstance(data, list | tuple):
            return torch.tensor(data, dtype=dtype, device="cuda")
        return torch.empty(data, *sizes, dtype=dtype, device="cuda")

    return make


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return self.to(torch.device("cuda", index_of(device)), non_blocking=non_blocking)


_resize_on_cpu, _to_on_cpu = torch.UntypedStorage.resize_, torch.UntypedStorage.to


def _resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _resize_on_cpu(self, size)
    native.resize_storage(self, size)
    return self


def _storage_to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
    device = torch.device(device)
    if device.type != "cuda" or self.device.type == "cuda":
        return _to_on_cpu(self, device=device, non_blocking=non_blocking)
    copy = torch.empty(self.nbytes(), dtype=torch.uint8, device=device)
    if self.nbytes():
        copy.copy_(torch.empty(0, dtype=torch.uint8).set_(self), non_blocking=non_blocking)
    return copy.untyped_storage()
