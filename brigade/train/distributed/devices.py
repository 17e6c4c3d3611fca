"""The GPUs of this host: what its driver counts, what torch sees of it, and which one is this rank's."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from ...errors import UserError, first_line
from ...errors.console import counted
from ..host.cluster import World
from . import torch_build, visible

VERSION_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
NODES = Path("/dev")
KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # of AMD's kernel driver
# AMD's graphics inside processors, for which PyTorch has no code, by gfx_target_version: gfx801, gfx902, gfx909, gfx90c, gfx1033,
# gfx1035, gfx1036, gfx1103. A laptop with one is a host without GPUs.
INTEGRATED = {80001, 90002, 90009, 90012, 100303, 100305, 100306, 110003}
UNNUMBERED = ("dxg", "nvhost-gpu", "nvgpu")  # of WSL and of Jetsons: one node, however many GPUs
YES = ("1", "true", "yes", "on", "t", "y")  # as accelerate reads it (utils/environment.py: str_to_bool)


def keep_fp32() -> None:
    """Let products and convolutions of fp32 numbers be fp32 on every host, not TF32 with its 10 bits of mantissa.

    NVIDIA's images switch TF32 on by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and convolutions have it by torch's default. What is fp32
    beside bf16 is so on purpose: routers, states of linear attention, positions (huggingface/transformers#48428).
    """
    import torch

    # torch's other way (fp32_precision) does not go with its compiler's reads
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, 535.129.03 for instance; None where nothing tells it."""
    for name in VERSION_FILES:
        with suppress(OSError):
            match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path(name).read_text())
            if match:
                return match[0]
    return _asked_of_nvml()[1]


def count_by_driver() -> int:
    """Return how many of NVIDIA's GPUs this process may use, by NVML; where that does not answer, as in a container without
    `utility` in NVIDIA_DRIVER_CAPABILITIES, by the device nodes; where those have no number, by CUDA."""
    count = _asked_of_nvml()[0]
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


def _asked_of_nvml() -> tuple[int | None, str | None, tuple[int, int] | None]:
    """How many of the GPUs that NVML counts this process may use, the driver's version, and the first GPU's compute capability,
    also of one that torch cannot use; None for what it does not say."""
    count = version = capability = None
    with suppress(Exception):  # no package, no library, no driver, or one that was updated while it ran
        import pynvml as nvml

        nvml.nvmlInit()
        try:
            count = sum(_has_permission(nvml, number) for number in range(nvml.nvmlDeviceGetCount()))
            told = nvml.nvmlSystemGetDriverVersion()
            version = told.decode() if isinstance(told, bytes) else str(told)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByIndex(0))
            capability = int(major), int(minor)
        finally:
            nvml.nvmlShutdown()
    return count, version, capability


def _has_permission(nvml: ModuleType, number: int) -> bool:
    """Whether this process may use the GPU. NVML counts also those of others' jobs (nvml.h: nvmlDeviceGetCount_v2)."""
    try:
        nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError_NoPermission:
        return False
    except nvml.NVMLError:  # a GPU that is lost, or without power
        return True
    return True


def count_of_amd(nodes: Path) -> int:
    """Return how many GPUs AMD's kernel driver tells this process of, whatever torch is. nodes: KFD"""
    return sum(map(_is_amds_gpu, nodes.glob("*")))


def _is_amds_gpu(node: Path) -> bool:
    """Whether a node of KFD's is a GPU that this process may use: a processor has the number 0, and the file of a GPU that a
    container's devices do not include cannot be read."""
    try:
        number = int((node / "gpu_id").read_text())
        properties = dict(re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.MULTILINE))
    except (OSError, ValueError):
        return False
    return number > 0 and int(properties.get("gfx_target_version", 0)) not in INTEGRATED


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""


def unseen(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why torch sees none of this host's GPUs, and the cure; None where it sees one, where there is none, and where the
    environment asks for a CPU."""
    import torch

    asked = environment.get(visible.VISIBLE)
    if torch.cuda.is_available() or wants_cpu(environment):
        return None
    otherwise = f"; {visible.VISIBLE}= trains on the CPU"
    count = count_by_driver()
    if not count:
        of_amd = count_of_amd(KFD)
        if not of_amd:
            return None
        problem, cure = _amds_unseen(of_amd)
        return problem, cure + otherwise
    has, driver, capability = f"it has {counted(count, 'GPU')}, and", driver_version(), _asked_of_nvml()[2]
    old = torch_build.too_old(driver, torch.version.cuda, capability)
    if old:
        return f"{has} {old[0]}", old[1] + otherwise
    if not torch.version.cuda:
        index = torch_build.suitable(driver, capability)
        cure = f"install {torch_build.from_index(index) if index else 'a newer driver, and a build for it'}"
        return f"{has} torch {torch.__version__} is a build without CUDA", cure + otherwise
    which = f" of {visible.VISIBLE}={asked}" if asked is not None else ""
    problem = f"{has} torch {torch.__version__} for CUDA {torch.version.cuda} sees none{which} (driver {driver}): {_why_none()}"
    return problem, f"`nvidia-smi` there; a reboot loads a driver that was updated while it ran{otherwise}"


def _amds_unseen(count: int) -> tuple[str, str]:
    """Why torch sees none of this host's GPUs of AMD's, and the cure."""
    import torch

    if not torch.version.hip:
        return torch_build.not_for_amd(count, torch.__version__, torch.version.cuda)
    has = f"it has {counted(count, 'GPU')} of AMD's, and torch {torch.__version__} for ROCm {torch.version.hip}"
    return f"{has} sees none: {_why_none()}", "`rocminfo` there; the user has to be in the groups render and video"


def _why_none() -> str:
    """Why torch sees no GPU, in its own words."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # whatever it says
        return first_line(error)
    return "it does not say why"


def without_code(number: int) -> tuple[str, str] | None:
    """Return why torch cannot compute on the GPU of this index among those that this process sees, and the cure; None where it
    can. AMD's are not asked: they have other names, and ROCm's build says itself what it lacks."""
    import torch

    if not torch.version.cuda:
        return None
    capability, built_for = torch.cuda.get_device_capability(number), torch.cuda.get_arch_list()
    return torch_build.without_code(capability, built_for, driver_version())


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

    number = index(world)
    if number is None:
        return None
    return world.host, number, str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))


def wants_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for a CPU: by DeepSpeed's variable, by Accelerate's, or by hiding all GPUs."""
    hidden = not visible.entries(environment.get(visible.VISIBLE, "all"))
    by_accelerate = environment.get("ACCELERATE_USE_CPU", "").lower() in YES
    return hidden or by_accelerate or environment.get("DS_ACCELERATOR") == "cpu"


def check(world: World) -> None:
    """Raise UserError where this host has GPUs and torch sees none of them: the run would silently train on the CPU."""
    found = unseen(os.environ)
    if found:
        raise UserError(f"host {world.host}", *found, "host")


def main() -> None:
    """Say what `make setup` should say of this host's GPUs. It refuses nothing: a login node may have another driver."""
    found = unseen(os.environ)
    if found:
        print("warning: runs on this host will be refused: {}\n  cure: {}".format(*found), file=sys.stderr)


if __name__ == "__main__":
    main()
