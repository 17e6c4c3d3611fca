"""DeepSpeed's kernels, which it compiles at first use: where they lie, and cpu_adam compiled beforehand.

    python -m brigade.train.upstream.deepspeed_kernels     what `make kernels` calls

Of those for CPUs a run needs cpu_adam where it offloads the optimizer's states, on hosts with GPUs too, and async_io where it
offloads to NVMe. A third is left out: `without_shared_memory`.

The cache is the virtual environment's own: kernels are compiled against its headers, and two environments that share one
cache compile each other's kernels away. So do two names of one environment, as where `.venv` is a link: the names of the headers
are in the compiler's command. Whoever compiles holds a lock file there for which torch waits without end
(torch/utils/file_baton.py); the locks below see to it that a killed process leaves none.
"""

import fcntl
import functools
import importlib
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.file_baton import FileBaton


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

    end_locks_with_their_holder()
    ask_cpu_once()
    print("Compiling DeepSpeed's cpu_adam, the optimizer of offloaded states (once; about a minute) ...", flush=True)
    began = time.perf_counter()
    get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
    print(f"  {time.perf_counter() - began:.0f} s", flush=True)


# ---- py-cpuinfo -----------------------------------------------------------------------------------------------------
def ask_cpu_once() -> None:
    """Let py-cpuinfo look at the CPU once in this process and in those that it forks: it takes a second of computing.

    DeepSpeed asks twice for each kernel (ops/op_builder/builder.py: cpu_arch, simd_width) and once for each optimizer on the CPU
    (ops/adam/cpu_adam.py): a rank with states on the CPU began two seconds later, one with states on NVMe four.
    """
    from cpuinfo import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info_json, "cache_info"):  # get_cpu_info makes a new dict of this text each time
        cpuinfo.get_cpu_info_json = functools.cache(cpuinfo.get_cpu_info_json)


# ---- locks of kernels that are being compiled -----------------------------------------------------------------------
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"}  # where all see each other's locks
HOURS = 1  # after which any other lock is nobody's: a kernel takes minutes
LOCKED = b"flock\n"  # what the file of a holder who has it locked says


def end_locks_with_their_holder() -> None:
    """Let torch's lock of a kernel (FileBaton) end with its holder, for this process and those that it forks.

    torch only makes a file and removes it; a killed process leaves it. Here the holder has the file locked by the operating
    system too, which every process sees, in whatever pid namespace, and which ends with the holder.
    """
    from torch.utils.file_baton import FileBaton

    FileBaton.try_acquire, FileBaton.release = _acquire, _release  # type: ignore[method-assign]


def _acquire(self: "FileBaton") -> bool:
    _remove_left_over(Path(self.lock_file_path))
    try:
        self.fd = os.open(self.lock_file_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with suppress(OSError):  # a file system without locks: then only age tells
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


if __name__ == "__main__":
    main()
