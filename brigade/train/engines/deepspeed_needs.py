"""What DeepSpeed's kernels need of a host."""

import ctypes.util
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...errors.disk import writing
from ..strategy import Strategy
from ..strategy.deepspeed_config import is_quantised, offloads_states, swaps_to_nvme
from ..upstream import deepspeed_kernels as kernels


def lacking(strategy: Strategy, gpu: bool) -> Iterator[tuple[str, str]]:
    """What this host lacks for the kernels of a ds_config: problem, cure."""
    config = strategy.ds_config or {}
    swaps, quantised = swaps_to_nvme(config), is_quantised(config)
    if quantised and not gpu:
        problem = "ZeRO++'s quantised weights and gradients are CUDA kernels, and this host has no GPU"
        yield problem, "use ds_configs/zero3_hpz.json, the part of ZeRO++ that needs none"
    if swaps or quantised or offloads_states(config):
        from torch.utils.cpp_extension import CUDA_HOME

        compiles = "DeepSpeed compiles kernels for this run, and"
        # cpu_adam is plain C++ on GPU hosts too (accelerator/cuda_accelerator.py: _lazy_init_class_dict). async_io takes CUDA's
        # headers and libraries (op_builder/async_io.py: include_paths), and the quantizer of ZeRO++ is CUDA.
        if gpu and (swaps or quantised) and CUDA_HOME is None:
            cure = "install the toolkit of torch's CUDA version, and set CUDA_HOME"
            yield f"{compiles} there is no CUDA toolkit (nvcc)", cure
        if not shutil.which("g++"):
            yield f"{compiles} there is no g++", "apt-get install g++"
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            yield f"{compiles} Python.h is missing", "apt-get install python3-dev"
        folder = kernels.cache()  # torch locks it also where all kernels lie in it
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    if swaps and not ctypes.util.find_library("aio"):
        yield "NVMe offload needs libaio, which this host lacks", "apt-get install libaio-dev"


def uncompiled(strategy: Strategy) -> list[str]:
    """The kernels for CPUs that DeepSpeed compiles at this run's start: needed, not in the cache, and not installed with it
    (DS_BUILD_OPS)."""
    from deepspeed.git_version_info import installed_ops

    config = strategy.ds_config or {}
    needed = {"cpu_adam": offloads_states(config), "async_io": swaps_to_nvme(config)}
    there = {name for name in needed if installed_ops.get(name) or kernels.is_compiled(name)}
    return [name for name, is_needed in needed.items() if is_needed and name not in there]
