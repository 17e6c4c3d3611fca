"""A fake GPU for torch: unchanged programs find CUDA devices and NCCL, without a GPU (docs/evidence/fake-gpu.md).

A library registers an allocator, a device guard, hooks and a boxed fallback under the CUDA key: memory is the host's, each
operator runs its CPU kernel, and operands on different devices raise. NCCL is Gloo on that memory, and refuses CPU tensors.

    environment(gpus=2)     os.environ | this: a process so started finds two GPUs, and what it starts does too
"""

import ctypes
import os
from pathlib import Path

from . import cuda_part
from .build import DEVICE, MODULE, build

SITE = Path(__file__).resolve().parent / "site"


def environment(gpus: int = 2, kind: str = "h100") -> dict[str, str]:
    """Return the variables by which a process, and those that it starts, find so many GPUs; builds the device once.

    kind: h100, 4090 or t4, whose name, capability and memory the device has (driver.py: KINDS)
    """
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "FAKE_GPUS": str(gpus),
        "FAKE_GPU_KIND": kind,
        "FAKE_GPU_LIBRARY": str(build()),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "TORCH_DISABLE_NATIVE_JIT": "1",  # operators that torch's build for CUDA has as Triton programs
    }


def load_device(torch: Path) -> None:
    """Load the device before torch's Python part, which asks once what accelerators there are. torch: its folder"""
    names = ["libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"]
    if cuda_part.is_in(torch):
        names.append("libc10_cuda.so")  # whose device and allocator the fake one then replaces
    for name in names:
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(Path(os.environ["FAKE_GPU_LIBRARY"], DEVICE)), mode=ctypes.RTLD_GLOBAL)


def install() -> None:
    """Let the torch that was just imported answer for the device."""
    from . import attention, driver, nccl

    driver.install()
    nccl.install()
    attention.install()


__all__ = ["MODULE", "SITE", "build", "environment", "install", "load_device"]
