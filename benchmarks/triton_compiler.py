"""Triton kernels compiled for a GPU that is not there: the registers, spills and shared memory of each.

A driver that only answers which GPU it is stands in for CUDA's. Each launch then compiles its kernel with the arguments that it
would be launched with, and computes nothing. Of a kernel that tunes itself, every configuration is compiled that Triton would
try. Registers and spills are what `ptxas -v` says when Triton calls it; shared memory is the compiled kernel's own figure.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Shared memory that one block may take, in bytes: CUDA programming guide, "Technical specifications per compute capability":
# 163 KiB for 8.0, 227 KiB for 9.0 and 10.0, 99 KiB for 12.0. Multiprocessors of an A100, an H100 SXM, a B200 and an RTX 5090.
GPUS: dict[int, dict[str, Any]] = {
    80: {"name": "NVIDIA A100-SXM4-80GB", "max_shared_mem": 163 * 1024, "multiprocessor_count": 108},
    90: {"name": "NVIDIA H100 80GB HBM3", "max_shared_mem": 227 * 1024, "multiprocessor_count": 132},
    100: {"name": "NVIDIA B200", "max_shared_mem": 227 * 1024, "multiprocessor_count": 148},
    120: {"name": "NVIDIA GeForce RTX 5090", "max_shared_mem": 99 * 1024, "multiprocessor_count": 170},
}
WARPS = "warps and stages"  # what a configuration chooses that names nothing else
SAID: dict[
    str, tuple[int, int]
] = {}  # registers and spilled bytes by a kernel's hash: ptxas speaks once, and Triton keeps kernels
LOG = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)


class Driver:
    """What kernels and libraries ask a GPU for before they launch anything."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        known = GPUS[arch] | {"max_num_regs": 65536, "warpSize": 32}
        self.target = GPUTarget("cuda", arch, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda index: known)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(arch: int) -> None:
    """Let Triton, and libraries that are imported from now on, find this GPU; torch keeps computing on the CPU."""
    import torch
    import triton

    gpu = GPUS[arch]
    triton.runtime.driver.set_active(Driver(arch))
    torch.cuda.get_device_capability = lambda device=None: (arch // 10, arch % 10)
    torch.cuda.get_device_name = lambda device=None: gpu["name"]
    torch.cuda.device_count = lambda: 1


def first_configuration() -> None:
    """Let an autotuned kernel take the first of its configurations: nothing is timed here."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *arguments, config, **named: [0.0]


@contextlib.contextmanager
def compiled(cache: Path) -> Iterator[list[dict[str, Any]]]:
    """Compile what is launched inside, instead of running it; the list gets a row for each kernel and configuration.

    cache: an empty directory, for Triton's compiled kernels: of one that was compiled before ptxas says nothing
    """
    import torch
    from triton import knobs
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    rows: list[dict[str, Any]] = []
    plain_run, plain_bench, plain_empty = JITFunction.run, Autotuner._bench, torch.empty
    seen: set[str] = set()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            kernel = plain_run(self, *arguments, grid=grid, warmup=True, **named)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            if logged := LOG.search(said.getvalue()):
                stores, loads, used = map(int, logged.groups())
                SAID[kernel.hash] = used, stores + loads
            registers, spilled = SAID[kernel.hash]
            row = {"kernel": self.__name__, "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages}
            row |= {"registers": registers, "spilled": spilled, "shared": kernel.metadata.shared}
            rows.append(row | {"tuned": getattr(self, "_configuration", "")})
        return kernel

    def bench(self: Any, *arguments: Any, config: Any, **named: Any) -> list[float]:
        function = self.fn
        while not isinstance(function, JITFunction):
            function = function.fn
        function._configuration = ", ".join(f"{key} {value}" for key, value in config.kwargs.items()) or WARPS
        self.fn.run(*arguments, **named, **config.all_kwargs())
        return [0.0]

    JITFunction.run, Autotuner._bench = run, bench
    torch.empty = torch.ones  # what no kernel fills is read as a size in places (Liger's experts)
    with knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = str(cache), True
        try:
            yield rows
        finally:
            JITFunction.run, Autotuner._bench, torch.empty = plain_run, plain_bench, plain_empty
