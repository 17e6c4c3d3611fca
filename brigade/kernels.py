"""Compile the DeepSpeed kernels that a run without a GPU needs, once, so that no run waits for a compiler.

    python -m brigade.kernels

DeepSpeed compiles them at first use into torch's extension cache, under the eyes of all ranks; `make setup` does it here.
With a GPU nothing is compiled: what a run there needs depends on its strategy.

The cache is the virtual environment's own: kernels are compiled against its headers, and two environments that share one
cache compile each other's kernels away. Whoever compiles holds a lock file there for which torch waits without end
(torch/utils/file_baton.py), so one that a killed process left behind is taken away first.
"""

import ctypes.util
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

LOCAL = {"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"}  # no other host writes there
HOURS = 1  # after which a lock on any other file system is nobody's: a kernel takes minutes

BUILDERS = {"ShareMemCommBuilder": "deepspeed_shm_comm: collectives of ranks on one host",
            "CPUAdamBuilder": "cpu_adam: the optimizer of offloaded states"}  # fmt: skip
WITH_LIBAIO = {"AsyncIOBuilder": "async_io: offload to NVMe"}


def cache() -> Path:
    """Torch's extension cache for this process and its children: what the user set, else the virtual environment's own."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def sweep_locks(folder: Path) -> list[Path]:
    """Remove the locks under `folder` that no process of this host holds; returns them. Where other hosts may hold one,
    only those older than HOURS."""
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    held = _open_files() if locks else set()
    old = time.time() - HOURS * 3600
    left = [lock for lock in locks if lock.resolve() not in held and (_is_local(lock) or lock.stat().st_mtime < old)]
    for lock in left:
        lock.unlink(missing_ok=True)
    return left


def _open_files() -> set[Path]:
    """What the processes of this host have open, as far as this user may see it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or one that ends while it is looked at
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    found.add(link.readlink())
    return found


def _is_local(path: Path) -> bool:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(around)[1] in LOCAL


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
    for lock in sweep_locks(cache()):
        print(f"Removed {lock}, left by a process that is gone.")
    wanted = BUILDERS | (WITH_LIBAIO if ctypes.util.find_library("aio") else {})
    print(f"Compiling {len(wanted)} of DeepSpeed's CPU kernels (once; two to four minutes) ...", flush=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        for name, seconds in pool.map(build, wanted):
            print(f"  {wanted[name]} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
