"""Proofs made on this host, in the user's cache: one file for each device, driver, set of versions, kind of attention in the
model, and shapes of the recipe. A proof that differs from this host in any of them is not used."""

import functools
import hashlib
import json
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import first_line
from ..errors.versions import installed
from ..train.distributed import devices
from ..train.host import files
from ..train.host.cache import cache_directory, private_folder
from ..train.host.checksums import sealed, unsealed
from . import judging, models, paths
from .paths import Row

FORMAT = 1
PACKAGES = ("torch", "transformers", "flash-attn", "flash-attn-3", "liger-kernel", "bitsandbytes", "triton")
BOOT = Path("/proc/sys/kernel/random/boot_id")
HERE = Path(__file__).parent
CODE = ("compare.py", "models.py", "steps.py", "paths.yaml", "trials.py")
# What samples go through on their way to a path, in brigade/; the table names what makes the path itself.
OURS = (
    "train/data/collate.py",
    *(f"train/model/{name}.py" for name in ("cpu_attention", "packed_samples", "sample_by_sample")),
)


def folder() -> Path:
    """The directory of the proofs."""
    return cache_directory("kernels")


def device(index: int = 0) -> Row:
    """{"type": "cuda" or "cpu", "name", "capability", "driver", "cuda"} of this process's device of that index."""
    if not torch.cuda.is_available():
        return {"type": "cpu", "name": processor(), "capability": None, "driver": platform.release(), "cuda": None}
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "type": "cuda",
        "name": torch.cuda.get_device_name(index),
        "capability": major + minor / 10,
        "driver": driver(),
        "cuda": torch.version.cuda or f"ROCm {getattr(torch.version, 'hip', None)}",
    }


def processor() -> str:
    """The CPU's own name, as Linux has it."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


@functools.cache
def driver() -> str:
    """The version of NVIDIA's driver; where nothing tells it, a name for the time since the host was booted."""
    version = devices.driver_version()
    if version:
        return version
    with suppress(OSError):
        return f"unknown, since boot {BOOT.read_text().strip()}"
    return "unknown"


@functools.cache
def versions() -> Row:
    """The versions of the packages whose kernels are proven, and a digest of our own code ("code")."""
    of_packages: Row = {package: installed(package) for package in PACKAGES}
    files = [HERE / name for name in CODE] + [HERE.parent / name for name in sorted({*OURS, *_made_by_ours()})]
    return of_packages | {"code": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]}


def _made_by_ours() -> list[str]:
    """Return the files in brigade/ whose functions the table of paths names."""
    named = [str(value) for row in paths.table().values() for value in row.values()]
    modules = [name.partition(":")[0] for name in named if name.startswith(f"{HERE.parent.name}.")]
    return [f"{module.partition('.')[2].replace('.', '/')}.py" for module in modules]


def key(config: Row, shapes: Row, device: Row) -> Row:
    """What a proof holds for. config: as from models.as_json(); shapes: as from prove.shapes_of()"""
    layer = json.dumps(models.for_timing(config), sort_keys=True, default=str)
    return {
        "format": FORMAT,
        "device": device,
        "versions": versions(),
        "attention": models.family(config),
        "layers": hashlib.sha256(layer.encode()).hexdigest()[:16],
        "shapes": shapes,
    }


def path_of(key: Row) -> Path:
    """The file of the proof for a key."""
    return folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"


def read(key: Row) -> tuple[Row | None, str]:
    """(the proof for this key or None; what a user has to know of a file that is not used, or "")."""
    file = path_of(key)
    try:
        proof = unsealed(files.read_text(file))
    except FileNotFoundError:
        return None, _other(key)
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None, f"the proof in {file} cannot be read ({first_line(error)}) and is not used"
    if proof["key"] != key:
        return None, f"{file} is the proof of something else ({_difference(proof['key'], key)}) and is not used"
    return proof, ""


def write(proof: Row) -> Path | None:
    """Keep a proof, with what an older one knows beyond it (judging.merged). Returns its file; None where that cannot be written.
    The last of several writers wins, and a reader always sees a whole proof."""
    file = path_of(proof["key"])
    old = read(proof["key"])[0] if file.exists() else None
    if old:
        proof = judging.merged(old, proof)
    try:
        private_folder(file.parent)
        files.write(file, sealed(proof))
    except OSError:
        return None
    return file


def _other(key: Row) -> str:
    """A sentence about a proof of the same attention and shapes, made with another driver, device or version; "" if none."""
    same = ("attention", "layers", "shapes")
    for file in sorted(folder().glob("*.json"), key=lambda file: file.name):
        with suppress(OSError, ValueError, RecursionError):
            proof = unsealed(files.read_text(file))
            if all(proof["key"].get(name) == key[name] for name in same):
                return f"the proof in {file} is of other things ({_difference(proof['key'], key)}) and is not used"
    return ""


def _difference(theirs: Row, ours: Row) -> str:
    """The first two differences, as in `driver 550.54.14, now 570.86.10`."""
    flat = [{**key.get("device", {}), **key.get("versions", {}), **key} for key in (theirs, ours)]
    names = [name for name in flat[1] if name not in ("device", "versions") and flat[0].get(name) != flat[1][name]]
    return ", ".join(f"{name} {flat[0].get(name)}, now {flat[1][name]}" for name in names[:2]) or "unlike this host"
