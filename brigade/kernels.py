"""Compile the DeepSpeed kernels that a run without a GPU needs, once, so that no run waits for a compiler.

    python -m brigade.kernels

DeepSpeed compiles them at first use into torch's extension cache, under the eyes of all ranks; `make setup` does it here.
With a GPU nothing is compiled: what a run there needs depends on its strategy.
"""

import ctypes.util
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

BUILDERS = {"ShareMemCommBuilder": "deepspeed_shm_comm: collectives of ranks on one host",
            "CPUAdamBuilder": "cpu_adam: the optimizer of offloaded states"}  # fmt: skip
WITH_LIBAIO = {"AsyncIOBuilder": "async_io: offload to NVMe"}


def build(name: str) -> tuple[str, float]:
    """Build and load one kernel; returns its name and the seconds it took."""
    from deepspeed.accelerator import get_accelerator

    began = time.perf_counter()
    get_accelerator().create_op_builder(name).load(verbose=False)
    return name, time.perf_counter() - began


def main() -> None:
    import torch

    if torch.cuda.is_available():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    wanted = BUILDERS | (WITH_LIBAIO if ctypes.util.find_library("aio") else {})
    print(f"Compiling {len(wanted)} of DeepSpeed's CPU kernels (once; two to four minutes) ...", flush=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        for name, seconds in pool.map(build, wanted):
            print(f"  {wanted[name]} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
