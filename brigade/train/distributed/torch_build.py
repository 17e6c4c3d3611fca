"""What torch is built for, and which of PyTorch's builds suits a driver and a GPU.

Torch's version.py tells it: importing torch takes seconds, and what it reads from the environment has to be set before.
"""

import ast
import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...errors.console import counted


class Build(NamedTuple):
    """cuda, hip: versions of CUDA ("13.0") and ROCm that torch is built for; None where it is not, or nothing tells."""

    cuda: str | None = None
    hip: str | None = None


class Index(NamedTuple):
    """One of PyTorch's package indexes: its name, the first driver for all minor versions of its CUDA (NVIDIA, "CUDA
    Compatibility"), and the first and the last architecture of GPUs that it has code for."""

    name: str
    driver: int
    first: tuple[int, int]
    last: tuple[int, int]


# Those that torch 2.12 to 2.14 is in (pytorch#178665, #190385), the one with PyPI's build of 2.13 first; cu132 is as cu130.
INDEXES = (Index("cu130", 580, (7, 5), (12, 1)), Index("cu126", 525, (5, 0), (9, 0)))
ROCM_INDEX = "rocm7.2"
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # CUDA's major version -> as Index has it
PAGE = "docs/troubleshooting.md"


def from_index(name: str) -> str:
    """Return what installs torch out of one of PyTorch's indexes, for a cure."""
    return f"torch from PyTorch's index {name} ({PAGE})"


def suitable(driver: str | None, capability: tuple[int, int] | None) -> str | None:
    """Return the index whose torch runs under this driver and has code for this GPU; None for none. What is None is not known,
    and excludes nothing."""
    for index in INDEXES:
        runs = driver is None or int(driver.partition(".")[0]) >= index.driver
        if runs and (capability is None or index.first <= capability <= index.last):
            return index.name
    return None


def too_old(driver: str | None, cuda: str | None, capability: tuple[int, int] | None = None) -> tuple[str, str] | None:
    """Return why a driver is too old for a torch that is built for this version of CUDA, and the cure; None where it is not, or
    where either is unknown. capability: of the host's GPU, where it is known"""
    if not driver or not cuda:
        return None
    least, has = OLDEST_DRIVER.get(int(cuda.partition(".")[0])), int(driver.partition(".")[0])
    if least is None or has >= least:
        return None
    index = suitable(driver, capability)
    problem = f"its driver {driver} is too old for torch, which is built for CUDA {cuda} and wants {least} or newer"
    return problem, f"install driver {least} or newer{f', or {from_index(index)}' if index else ''}"


def without_code(capability: tuple[int, int], architectures: list[str], driver: str | None) -> tuple[str, str] | None:
    """Return why torch cannot compute on a GPU, and the cure; None where it can. architectures: torch.cuda.get_arch_list()

    Machine code (sm_80) runs on GPUs of its major version from its minor one on, intermediate code (compute_80) on all later ones
    (CUDA's programming guide, "Application Compatibility"). Code for one architecture alone ends with a letter (sm_90a).
    """
    codes = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", each) for each in architectures]
    found = [(code[1], (int(code[2]), int(code[3])), code[4]) for code in codes if code]
    for kind, built_for, only in found:
        later = built_for <= capability and (kind == "compute" or built_for[0] == capability[0])
        if built_for == capability if only == "a" else later:
            return None
    if not found:  # a build that does not tell
        return None
    number, index, newer = "".join(map(str, capability)), suitable(driver, capability), suitable(None, capability)
    problem = f"torch has no code for this GPU (sm_{number}): it is built for {', '.join(architectures)}"
    if index:
        return problem, f"install {from_index(index)}"
    return problem, f"install a newer driver, and {from_index(newer)}" if newer else "use another GPU"


def not_for_amd(count: int, version: str, cuda: str | None) -> tuple[str, str]:
    """Return why so many GPUs of AMD's are not seen by a torch without ROCm, and the cure."""
    built = f"is built for CUDA {cuda}, which is NVIDIA's" if cuda else "is a build for CPUs"
    return f"it has {counted(count, 'GPU')} of AMD's, and torch {version} {built}", f"install {from_index(ROCM_INDEX)}"


def read() -> Build:
    """Return what the installed torch is built for."""
    with suppress(OSError, ValueError, SyntaxError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text()
            assigned = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE))
            return Build(*(ast.literal_eval(assigned.get(name, "None")) for name in ("cuda", "hip")))
    return Build()
