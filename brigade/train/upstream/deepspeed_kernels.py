"""Compile the DeepSpeed kernels of CPUs, once, so that hardly a run waits for a compiler.

    python -m brigade.train.upstream.deepspeed_kernels

DeepSpeed compiles them at first use into torch's extension cache, under the eyes of all ranks; `make setup` does it here.
On a host with GPUs only cpu_adam is compiled, for offloaded states. What is compiled at first use: kernels of CUDA, and async_io,
whose twelve files take as long as everything else in `make setup` and which only offload to NVMe needs.

The cache is the virtual environment's own: kernels are compiled against its headers, and two environments that share one
cache compile each other's kernels away. So do two names of one environment, as where `.venv` is a link: the names of the headers
are in the compiler's command. Whoever compiles holds a lock file there for which torch waits without end
(torch/utils/file_baton.py); upstream/locks.py sees to it that a killed process leaves none.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ...errors.console import counted
from . import cpu_facts, locks

ANYWHERE = {"CPUAdamBuilder": "cpu_adam: the optimizer of offloaded states"}
WITHOUT_GPU = {"ShareMemCommBuilder": "deepspeed_shm_comm: collectives of ranks on one host"}


def cache() -> Path:
    """Torch's extension cache for this process and its children: what the user set, else the virtual environment's own, one for
    each of its names."""
    prefix = Path(sys.prefix)
    if "TORCH_EXTENSIONS_DIR" not in os.environ and sys.prefix != sys.base_prefix and os.access(prefix, os.W_OK):
        name = "" if prefix.resolve() == prefix else str(prefix).strip("/").replace("/", "-")
        os.environ["TORCH_EXTENSIONS_DIR"] = str(prefix / "torch_extensions" / name)
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def find() -> None:
    """Let this process and its children find the kernels that are compiled, and the ninja that compiled them.

    It stands beside the interpreter, which over ssh and without an activated environment is not on PATH. Without it every
    build of DeepSpeed's dies; another ninja, as a system has, compiles each kernel once more.
    """
    cache()
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])


def build(name: str) -> tuple[str, float]:
    """Build and load one kernel; returns its name and the seconds it took."""
    from deepspeed.accelerator import get_accelerator

    began = time.perf_counter()
    get_accelerator().create_op_builder(name).load(verbose=False)
    return name, time.perf_counter() - began


def wanted(gpu: bool) -> dict[str, str]:
    """Return the builders of the kernels that this host needs -> what each is for."""
    return ANYWHERE if gpu else WITHOUT_GPU | ANYWHERE


def main() -> None:
    """Compile DeepSpeed's CPU kernels for this host."""
    import torch

    builders = wanted(torch.cuda.is_available())
    os.environ["DS_ACCELERATOR"] = "cpu"
    find()
    locks.end_with_their_holder()
    cpu_facts.ask_once()
    print(
        f"Compiling {counted(len(builders), 'kernel')} of DeepSpeed's for CPUs (once; one to two minutes) ...",
        flush=True,
    )
    with ProcessPoolExecutor(max_workers=2) as pool:
        for name, seconds in pool.map(build, builders):
            print(f"  {builders[name]} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
