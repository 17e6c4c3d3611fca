"""The GPUs of this host: what its driver counts, what torch sees of it, and which one is this rank's."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from ...errors.console import counted
from ..cluster import World

VERSION_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
NODES = Path("/dev")
UNNUMBERED = ("dxg", "nvhost-gpu", "nvgpu")  # of WSL and of Jetsons: one node, however many GPUs
# CUDA's major version -> the first driver for all of its minor versions (NVIDIA, "CUDA Compatibility").
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
YES = ("1", "true", "yes", "on", "t", "y")  # as accelerate reads it (utils/environment.py: str_to_bool)
HIDDEN = ("", "-1", "none", "nodevfiles")  # a first word of CUDA_VISIBLE_DEVICES with which a program sees no GPU


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, 535.129.03 for instance; None where nothing tells it."""
    for name in VERSION_FILES:
        with suppress(OSError):
            if match := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path(name).read_text()):
                return match[0]
    return _asked_of_nvml()[1]


def count_by_driver() -> int:
    """Return how many of NVIDIA's GPUs this process may use, by NVML; where that does not answer, as in a container without
    `utility` in NVIDIA_DRIVER_CAPABILITIES, by the device nodes; where those have no number, by CUDA."""
    count, _ = _asked_of_nvml()
    if count is None:
        count = sum(map(_may_open, NODES.glob("nvidia[0-9]*")))
    if not count and any((NODES / name).exists() for name in UNNUMBERED):
        count = _asked_of_cuda()
    return count


# In a process of its own: one that has started CUDA can no more fork one that uses it.
_COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(count.value)
"""


def _asked_of_cuda() -> int:
    """How many GPUs CUDA's driver library counts, also those that CUDA_VISIBLE_DEVICES hides; 0 where it does not answer."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", _COUNT]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        return int(subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment).stdout)
    return 0


def _may_open(node: Path) -> bool:
    """Whether this process may use the GPU. access(2) does not ask the control group of a batch job, only open(2) does."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EIO  # a GPU that is lost: it is this process's, and of no use
    return True


def _asked_of_nvml() -> tuple[int | None, str | None]:
    """How many of the GPUs that NVML counts this process may use, and the driver's version; None for what it does not say."""
    count = version = None
    with suppress(Exception):  # no package, no library, no driver, or one that was updated while it ran
        import pynvml as nvml

        nvml.nvmlInit()
        try:
            count = sum(_has_permission(nvml, number) for number in range(nvml.nvmlDeviceGetCount()))
            told = nvml.nvmlSystemGetDriverVersion()
            version = told.decode() if isinstance(told, bytes) else str(told)
        finally:
            nvml.nvmlShutdown()
    return count, version


def _has_permission(nvml: Any, number: int) -> bool:
    """Whether this process may use the GPU. NVML counts also those of others' jobs (nvml.h: nvmlDeviceGetCount_v2)."""
    try:
        nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError_NoPermission:
        return False
    except nvml.NVMLError:  # a GPU that is lost, or without power
        return True
    return True


def too_old(driver: str | None, cuda: str | None) -> tuple[str, str] | None:
    """Return why a driver is too old for a torch that is built for this version of CUDA, and the cure; None where it is not, or
    where either is unknown."""
    if not driver or not cuda:
        return None
    least, has = OLDEST_DRIVER.get(int(cuda.partition(".")[0])), int(driver.partition(".")[0])
    if least is None or has >= least:
        return None
    usable = max((major for major, first in OLDEST_DRIVER.items() if first <= has), default=None)
    build = f", or torch's build for CUDA {usable} (docs/troubleshooting.md)" if usable else ""
    problem = f"its driver {driver} is too old for torch, which is built for CUDA {cuda} and wants {least} or newer"
    return problem, f"install driver {least} or newer{build}"


def unseen(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why torch sees none of this host's GPUs, and the cure; None where it sees one, where there is none, and where the
    environment asks for a CPU."""
    import torch

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or wants_cpu(environment) or not (count := count_by_driver()):
        return None
    has, otherwise = f"it has {counted(count, 'GPU')}, and", "; CUDA_VISIBLE_DEVICES= trains on the CPU"
    if old := too_old(driver_version(), torch.version.cuda):
        return f"{has} {old[0]}", old[1] + otherwise
    if not torch.version.cuda:
        cure = "install a build for its driver (docs/troubleshooting.md)"
        return f"{has} torch {torch.__version__} is a build without CUDA", cure + otherwise
    why = "it does not say why"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever it says
        why = first_line(error)
    which = f" of CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    problem = f"{has} torch {torch.__version__} for CUDA {torch.version.cuda} sees none{which} (driver {driver_version()}): {why}"
    return problem, f"`nvidia-smi` there; a reboot loads a driver that was updated while it ran{otherwise}"


def index(world: World) -> int | None:
    """Return the index of this rank's GPU among those that it sees: its number on the host, or 0 where it sees only its own, as
    under `srun --gpus-per-task`. None where it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    return world.local_rank if count >= world.local_size else 0 if count == 1 else None


def identity(world: World) -> tuple[str, int, str] | None:
    """Return the host, the index and the UUID of this rank's GPU; None where it has none."""
    import torch

    if (number := index(world)) is None:
        return None
    return world.host, number, str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))


def wants_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for a CPU: by DeepSpeed's variable, by Accelerate's, or by hiding all GPUs."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip().lower()
    by_accelerate = environment.get("ACCELERATE_USE_CPU", "").lower() in YES
    return first in HIDDEN or by_accelerate or environment.get("DS_ACCELERATOR") == "cpu"


def check(world: World) -> None:
    """Raise UserError where this host has GPUs and torch sees none of them: the run would train on the CPU, without a word."""
    if found := unseen(os.environ):
        raise UserError(f"host {world.host}", *found, "host")


def main() -> None:
    """Say what `make setup` should say of this host's GPUs. It refuses nothing: a login node may have another driver."""
    if found := unseen(os.environ):
        print("warning: runs on this host will be refused: {}\n  cure: {}".format(*found), file=sys.stderr)


if __name__ == "__main__":
    main()
