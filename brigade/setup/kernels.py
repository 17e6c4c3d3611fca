"""Compile the DeepSpeed kernels that a run without a GPU needs, once, so that no run waits for a compiler.

    python -m brigade.setup.kernels

DeepSpeed compiles them at first use into torch's extension cache, under the eyes of all ranks; `make setup` does it here.
With a GPU nothing is compiled: what a run there needs depends on its strategy.

The cache is the virtual environment's own: kernels are compiled against its headers, and two environments that share one
cache compile each other's kernels away. Whoever compiles holds a lock file there for which torch waits without end
(torch/utils/file_baton.py); guard_locks() sees to it that a killed process leaves none.
"""

import ctypes.util
import fcntl
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.file_baton import FileBaton

LOCAL = {"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"}  # where all see each other's locks
HOURS = 1  # after which any other lock is nobody's: a kernel takes minutes
LOCKED = b"flock\n"  # what the file of a holder who has it locked says

BUILDERS = {"ShareMemCommBuilder": "deepspeed_shm_comm: collectives of ranks on one host",
            "CPUAdamBuilder": "cpu_adam: the optimizer of offloaded states"}  # fmt: skip
WITH_LIBAIO = {"AsyncIOBuilder": "async_io: offload to NVMe"}


def cache() -> Path:
    """Torch's extension cache for this process and its children: what the user set, else the virtual environment's own."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def guard_locks() -> None:
    """Let torch's lock of a kernel (FileBaton) end with its holder, for this process and those that it forks.

    torch only makes a file and removes it; who is killed leaves it. Here the holder has the file locked by the operating system
    too, which every process sees, in whatever pid namespace, and which ends with the holder.
    """
    from torch.utils.file_baton import FileBaton

    FileBaton.try_acquire, FileBaton.release = _acquire, _release  # type: ignore[method-assign]


def _acquire(self: "FileBaton") -> bool:
    _remove_left_over(Path(self.lock_file_path))
    try:
        self.fd = os.open(self.lock_file_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with suppress(OSError):  # a file system without locks: then age alone tells
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        os.write(self.fd, LOCKED)
    return True


def _release(self: "FileBaton") -> None:
    with suppress(FileNotFoundError):  # an older Brigade removed what it took for left over
        Path(self.lock_file_path).unlink()
    os.close(self.fd)  # after its file: an unlocked one is anybody's to remove


def _remove_left_over(lock: Path) -> None:
    """Remove a lock whose holder is gone: it was locked, on a file system where that shows, and is no more; or it is old."""
    with suppress(OSError), lock.open("r+b") as file:  # there is none; its holder is alive; it is another user's
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen = os.fstat(file.fileno())
        ended = file.read() == LOCKED and _is_local(lock)
        # Meanwhile another may have removed this one and made the next.
        if (ended or seen.st_mtime < time.time() - HOURS * 3600) and os.path.samestat(seen, lock.stat()):
            lock.unlink()


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
    cache()
    guard_locks()
    wanted = BUILDERS | (WITH_LIBAIO if ctypes.util.find_library("aio") else {})
    print(f"Compiling {len(wanted)} of DeepSpeed's CPU kernels (once; two to four minutes) ...", flush=True)
    with ProcessPoolExecutor(max_workers=2) as pool:
        for name, seconds in pool.map(build, wanted):
            print(f"  {wanted[name]} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
