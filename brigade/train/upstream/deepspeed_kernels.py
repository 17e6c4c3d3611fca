"""DeepSpeed's kernels, which it compiles at first use: where they lie, and cpu_adam compiled beforehand.

    python -m brigade.train.upstream.deepspeed_kernels     what `make kernels` calls

Of those for CPUs a run needs cpu_adam where it offloads the optimizer's states, on hosts with GPUs too, and async_io where it
offloads to NVMe. A third is left out: `without_shared_memory`.

The cache is the virtual environment's own: kernels are compiled against its headers, and two environments that share one
cache compile each other's kernels away. So do two names of one environment, as where `.venv` is a link: the names of the headers
are in the compiler's command. Whoever compiles holds a lock file there for which torch waits without end
(torch/utils/file_baton.py); upstream/locks.py sees to it that a killed process leaves none.
"""

import importlib
import os
import sys
import time
from pathlib import Path

from . import cpu_facts, locks


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


def is_compiled(name: str) -> bool:
    """Whether a kernel lies in the cache; name: as its folder there is called."""
    return (cache() / name / f"{name}.so").exists()


def without_shared_memory() -> None:
    """Let DeepSpeed's ranks on CPUs compile no kernel for sums through shared memory (deepspeed/comm/torch.py: build_shm_op).

    Only inference asks for it (inference_all_reduce), and it sums over all ranks of the host, whatever their group is.
    """
    # By its name: as an attribute of deepspeed.comm, `torch` is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def main() -> None:
    """Compile cpu_adam for this host, unless it is there."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    find()
    if is_compiled("cpu_adam"):
        return
    from deepspeed.accelerator import get_accelerator

    locks.end_with_their_holder()
    cpu_facts.ask_once()
    print("Compiling DeepSpeed's cpu_adam, the optimizer of offloaded states (once; about a minute) ...", flush=True)
    began = time.perf_counter()
    get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
    print(f"  {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
