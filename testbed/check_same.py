"""Hosts that differ in what they run or in what they are, for `python -m brigade check`: each fault as data."""

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import yaml

from . import strikes
from .check_reach import logs_in_as_usual, logs_in_by
from .cluster import PROJECT, Cluster
from .injected import Injected

ODD = "node2"  # the host at fault
STAND_IN = PROJECT / "testbed" / "stand_in" / "nvml"
H100 = PROJECT / "tests" / "data" / "nvml" / "h100-sxm.yaml"
OTHER_PYTHON = 'import sys\nsys.version = "3.12.4" + sys.version[6:]\nsys.version_info = (3, 12, 4, "final", 0)\n'
FEW = 100  # open files


# ---- sameness ----------------------------------------------------------------------------------------------------
def _metadata(package: str) -> Path:
    found = next(path for path in metadata.files(package) or [] if path.name == "METADATA")
    return Path(str(found.locate())).resolve()


def other_version(package: str, version: str) -> Injected:
    """The host's environment has another version of a package: its METADATA says so."""
    grave = package in ("accelerate", "torch")

    def arrange(cluster: Cluster) -> None:
        there = _metadata(package)
        text = there.read_text().replace(f"\nVersion: {metadata.version(package)}\n", f"\nVersion: {version}\n", 1)
        (cluster.shared / f"METADATA-{package}").write_text(text)
        cluster[ODD].bind(cluster.shared / f"METADATA-{package}", there)

    def heal(cluster: Cluster) -> None:
        cluster[ODD].unbind(_metadata(package))

    about = f"{ODD}'s {package} says that it is {version}"
    level, says = ("red" if grave else "yellow"), rf"{package} {version}, pinned {metadata.version(package)}"
    return Injected(f"other-{package}", about, arrange, ODD, "packages", says, heal, level)


def other_python(cluster: Cluster) -> None:
    folder = cluster.shared / "other_python"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(OTHER_PYTHON)
    cluster[ODD].environment(PYTHONPATH=str(folder))


def no_variables(cluster: Cluster) -> None:
    for host in cluster:
        host.environment()


def other_commit(cluster: Cluster) -> None:
    """A clone of its own with one commit more."""
    clone = cluster.shared / "other_clone"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", PROJECT, clone], check=True)
    with (clone / "train.py").open("a") as file:
        file.write("# one commit more\n")
    who = ["-c", "user.name=testbed", "-c", "user.email=testbed@localhost"]
    subprocess.run(["git", *who, "commit", "--quiet", "--all", "-m", "One more"], cwd=clone, check=True)
    environment, host = PROJECT / ".venv", cluster[ODD]
    if environment.is_symlink():
        (clone / ".venv").symlink_to(os.readlink(environment))  # noqa: PTH115
    elif environment.is_dir():  # the clone will hide it: its door stays open elsewhere
        (clone / ".venv").mkdir()
        host.run("mkdir -p /run/venv")
        host.bind(environment, "/run/venv")
    host.bind(clone, PROJECT)
    if environment.is_dir() and not environment.is_symlink():
        host.bind("/run/venv", environment)


def same_commit(cluster: Cluster) -> None:
    host, environment = cluster[ODD], PROJECT / ".venv"
    if environment.is_dir() and not environment.is_symlink():
        host.unbind(environment)
        host.unbind("/run/venv")
    host.unbind(PROJECT)


def other_variable(cluster: Cluster) -> None:
    cluster[ODD].environment(NCCL_ALGO="Tree")


# ---- devices -----------------------------------------------------------------------------------------------------
def unset_tmp(cluster: Cluster) -> None:
    cluster[ODD].environment(TMPDIR="/nowhere")


def tiny_shm(cluster: Cluster) -> None:
    cluster[ODD].run("mount -t tmpfs -o size=8m tmpfs /dev/shm")


def usual_shm(cluster: Cluster) -> None:
    cluster[ODD].run("umount /dev/shm")


def gpus(cluster: Cluster, count: int, odd: Path = H100) -> None:
    """Every host seems to have GPUs. odd: what NVML says on the host at fault"""
    for host in cluster:
        host.path = f"{STAND_IN}:{host.path}"
        said = odd if host.name == ODD else H100
        host.environment(PYTHONPATH=str(STAND_IN), STAND_IN_NVML=str(said), STAND_IN_GPUS=str(count))


def no_gpus(cluster: Cluster) -> None:
    for host in cluster:
        host.path = host.path.removeprefix(f"{STAND_IN}:")
        host.environment()
    cluster.hostfile(1)


def slots_above_devices(cluster: Cluster) -> None:
    gpus(cluster, 1)
    cluster.hostfile({host.name: 2 if host.name == ODD else 1 for host in cluster})


def link_down(cluster: Cluster) -> None:
    said = yaml.safe_load(H100.read_text())
    said["own"] = {1: {"nvlinks": [1] * 17 + [0]}}
    (cluster.shared / "nvml.yaml").write_text(yaml.safe_dump(said))
    gpus(cluster, 2, cluster.shared / "nvml.yaml")
    cluster.hostfile(2)


def half_as_fast(cluster: Cluster) -> None:
    """Python checks its memory on each allocation there, and so takes twice the time, however busy the machine is."""
    cluster[ODD].environment(PYTHONMALLOC="malloc_debug")


INJECTED = [
    other_version("accelerate", "1.14.0"),
    other_version("tqdm", "4.66.1"),
    Injected("other-python", f"{ODD}'s Python says that it is 3.12.4", other_python, ODD, "python",
             r"3\.12\.4, elsewhere", no_variables),
    Injected("other-commit", f"{ODD} has another commit", other_commit, ODD, "code",
             r"another commit \(.*train.py differs from node1's", same_commit),
    Injected("changed-file", f"train.py was changed on {ODD}", strikes.other_clone, ODD, "code",
             r"train.py differs from node1's", strikes.same_clone),
    Injected("other-variable", f"NCCL_ALGO=Tree in {ODD}'s login", other_variable, ODD, "variables",
             r"NCCL_ALGO is 'Tree'; elsewhere it is not set", no_variables),
    # The hard limit too: agents raise the soft one to it.
    Injected("few-open-files", f"ulimit -n {FEW} on {ODD}", logs_in_by(f"ulimit -n {FEW}"), ODD, "open files",
             r"may open 100 files", logs_in_as_usual),
    Injected("small-files", f"ulimit -f 1024 on {ODD}", logs_in_by("ulimit -f 1024"), ODD, "limits",
             r"a file may have 0\.00098 GiB there \(ulimit -f\)", logs_in_as_usual),
    Injected("no-tmp", f"TMPDIR of {ODD} is not there", unset_tmp, ODD, "room",
             r"/nowhere is not there, or cannot be written; Python takes", no_variables, "yellow"),
    Injected("tiny-shm", f"/dev/shm of {ODD} has 8 MiB", tiny_shm, ODD, "/dev/shm", r"of 0\.01 GiB are free", usual_shm),
    Injected("slots-above-devices", f"slots=2 for {ODD}, which has one GPU (a stand-in of nvidia-smi and NVML)",
             slots_above_devices, ODD, "gpus", r"slots=2 in the hostfile, but it has 1 GPU", no_gpus),
    Injected("nvlink-down", f"an NVLink of GPU 1 of {ODD} is down (a stand-in of NVML)", link_down, ODD, "gpu links",
             r"GPU 1: 17 of its 18 NVLinks are up", no_gpus),
    Injected("half-as-fast", f"PYTHONMALLOC=malloc_debug in {ODD}'s login", half_as_fast, ODD, "core speed",
             r"one core does \d+% of what the median", no_variables, "red", "usual", '--only "core speed"'),
]  # fmt: skip
