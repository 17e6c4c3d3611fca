"""What a host runs: versions, code, variables and paths. Needs only the standard library; torch is read and not imported, for
that takes seconds."""

import hashlib
import importlib
import os
import platform
import re
import subprocess
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

from ...errors.versions import installed
from ...hosts import Facts
from ...hosts.host_facts import PROJECT, file_hashes
from ...train.distributed import devices, torch_build

# Besides what project_hash() covers: what a run reads of the clone.
READ = ("recipes/**/*.yaml", "ds_configs/*.json", "accelerate_configs/*.yaml", "requirements.txt", "constraints.txt")
# Of a package's RECORD: its modules beside and in its top folders, and their sizes.
_TOP = re.compile(r"^((?:\w+/)?\w+\.py),[^,\n]*,(\d*)\s*$", re.MULTILINE)
ADDRESS = re.compile(r"(?i)_proxy$")  # of a name; whatever stands before an @ in an address may be a password


def look(
    names: list[str],
    patterns: list[str],
    left_out: list[str],
    secret: str,
    salt: str,
    paths: dict[str, str],
    own: list[str],
) -> Facts:
    """Read everything that is compared between hosts, in one process.

    names: of packages; patterns, left_out: of variables (fnmatch); paths: what it is for -> path; own: files of this run
    secret: a regular expression; a variable whose name it matches is answered as a hash with `salt`, and so is an address with an
    @. Paths that begin with ~ are of this host's user, as for its ranks.
    """
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: installed(name) for name in names},
        "lost": {name: said for name, said in zip(names, map(_lost, names), strict=True) if said},
        "torch": _torch(),
        "driver": devices.driver_version(),
        "amd": devices.count_of_amd(devices.KFD),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "glibc": platform.libc_ver()[1] or "none",
        "git": _git(),
        "variables": {
            name: _value(name, value, secret, salt)
            for name, value in sorted(os.environ.items())
            if _matches(name, patterns) and not _matches(name, left_out)
        },
        "own": {path: _hash(path) for path in own},
        "paths": {what: _path(path) for what, path in paths.items()},
    }


def files() -> Facts:
    """Path in the clone -> hash, of what a run reads there. Asked where clones differ, to name the file."""
    return {"files": file_hashes(READ)}


def loaded() -> Facts:
    """The CUDA libraries that torch really loads, and without_code: index -> [why it cannot compute on that GPU, the cure], of
    those that it sees. Imports torch."""
    import torch

    found: Facts = {"cuda": torch.version.cuda}
    with suppress(Exception):
        found["cudnn"] = str(torch.backends.cudnn.version())
    with suppress(Exception):
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(Exception):
        lacking = {str(number): devices.without_code(number) for number in range(torch.cuda.device_count())}
        found["without_code"] = {number: said for number, said in lacking.items() if said}
    return found


def sees_gpus() -> dict[str, bool]:
    """sees: whether torch finds a GPU here. Imports torch."""
    import torch

    return {"sees": torch.cuda.is_available()}


def _lost(name: str) -> str:
    """The first file that an installed package should have and has not, "" where none is missing.

    An installation that was broken off, or a disk that lost files, leaves metadata that say all is well. Only the modules at
    the top of a package are looked for: of all files it would take seconds.
    """
    with suppress(metadata.PackageNotFoundError, OSError):
        package = metadata.distribution(name)
        for file, size in _TOP.findall(package.read_text("RECORD") or ""):
            path = Path(str(package.locate_file(file)))
            if not path.is_file() or (int(size or 0) and not path.stat().st_size):
                return f"{file} is {'empty' if path.exists() else 'missing'}"
    return ""


def imports(modules: list[str]) -> Facts:
    """failed: module -> why it cannot be imported. One that ends the whole process is no answer, and said so."""
    found = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a SystemExit, too
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"failed": found}


def _torch() -> dict[str, str | None]:
    """cuda: that torch was built for, of its version.py, None for a build without; hip: of a build for ROCm; cudnn, nccl: of
    NVIDIA's wheels beside it"""
    built = torch_build.read()
    found: dict[str, str | None] = {"cuda": built.cuda} | ({"hip": built.hip} if built.hip else {})
    if found["cuda"]:
        major = found["cuda"].partition(".")[0]
        found |= {library: installed(f"nvidia-{library}-cu{major}") for library in ("cudnn", "nccl")}
    return found


def _git() -> Facts | None:
    """commit, and files of it that were changed; None where the clone has no git, or the host has none."""
    # A clone on a shared disk may belong to another user; and this question is to change nothing there.
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        said = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = said.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid")), "")
    changed = [line.split("\t")[0].split(" ", 9 if line[0] == "2" else 8)[-1] for line in lines if line[0] in "12u"]
    return {"commit": commit, "changed": changed[:50]}


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _value(name: str, value: str, secret: str, salt: str) -> dict[str, str]:
    """{"is": value}, or {"hash": ...} of what nobody may read."""
    address = "//" in value or ADDRESS.search(name)
    if re.search(secret, name) or (address and "@" in value):
        return {"hash": hashlib.sha256(f"{salt}{name}={value}".encode()).hexdigest()[:16]}
    return {"is": value[:500]}


def _hash(path: str) -> str | None:
    """The hash of a file as in host_facts.file_hashes(), None for one that cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:12]
    return None


def _path(path: str) -> Facts:
    """there: whether it exists; real: where it leads, of what is not there yet the part that is"""
    found = Path(path).expanduser().absolute()
    with suppress(OSError):
        return {"there": found.exists(), "real": os.path.realpath(found)}
    return {"there": False, "real": str(found)}
