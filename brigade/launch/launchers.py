"""Each host's own local launcher: the exact command that `launch` starts there."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..recipe.files import REPOSITORY
from .job import Job

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """A host's place in the run: its number among the hosts, and where rank 0 waits for the others."""

    number: int
    address: str
    port: int


def files(launcher: str, job: Job) -> dict[str, str]:
    """Texts that the commands need as files on every host; {name} in a command stands for the file's path."""
    if launcher == "deepspeed":
        return {"hostfile": "".join(f"{host} slots={slots}\n" for host, slots in job.hosts.items())}
    if launcher == "accelerate":
        import yaml

        from .write_accelerate import document

        return {"accelerate.yaml": yaml.safe_dump(document(job, launched=True), sort_keys=False)}
    return {}


def command(launcher: str, job: Job, place: Place) -> list[str]:
    """The words that start the ranks of one host, with {name} for what files() gives."""
    program = str(Path(sys.executable).parent / LAUNCHERS[launcher].program)
    return [program, *LAUNCHERS[launcher].arguments(job, place), script(), *job.train_arguments]


def script() -> str:
    """train.py as seen from here."""
    return "train.py" if Path.cwd() == REPOSITORY else str(REPOSITORY / "train.py")


def choose(job: Job, named: str | None, in_slurm: bool) -> str:
    """The launcher that was named, or the strategy's own: deepspeed for ZeRO, else torchrun. Raises UserError where it
    cannot start this job."""
    launcher = named or ("slurm" if in_slurm else "deepspeed" if job.strategy.is_deepspeed else "torchrun")
    if launcher not in LAUNCHERS:
        raise UserError(
            f"flag --launcher {launcher}", "there is no such launcher", f"use one of: {', '.join(LAUNCHERS)}"
        )
    if not LAUNCHERS[launcher].unequal and len(set(job.hosts.values())) > 1:
        slots = ", ".join(f"{host} {number}" for host, number in list(job.hosts.items())[:4])
        raise UserError(
            f"{job.hostfile}",
            f"hosts have different numbers of slots ({slots}), and {launcher} counts the same on all",
            "use --launcher torchrun or deepspeed, or give all hosts the same slots",
        )
    return launcher


def _torchrun(job: Job, place: Place) -> list[str]:
    slots = list(job.hosts.values())[place.number]
    return [
        "--nnodes",
        str(len(job.hosts)),
        "--nproc_per_node",
        str(slots),
        "--node_rank",
        str(place.number),
        "--master_addr",
        place.address,
        "--master_port",
        str(place.port),
    ]


def _deepspeed(job: Job, place: Place) -> list[str]:
    return [
        "--hostfile",
        "{hostfile}",
        "--no_ssh",
        "--node_rank",
        str(place.number),
        "--master_addr",
        place.address,
        "--master_port",
        str(place.port),
    ]


def _accelerate(job: Job, place: Place) -> list[str]:
    return [
        "launch",
        "--config_file",
        "{accelerate.yaml}",
        "--machine_rank",
        str(place.number),
        "--main_process_ip",
        place.address,
        "--main_process_port",
        str(place.port),
    ]


@dataclass(frozen=True)
class Launcher:
    """program: beside this interpreter; unequal: whether hosts may have different numbers of slots."""

    program: str
    arguments: Callable[[Job, Place], list[str]]
    unequal: bool


LAUNCHERS = {
    "deepspeed": Launcher("deepspeed", _deepspeed, unequal=True),
    "torchrun": Launcher("torchrun", _torchrun, unequal=True),
    "accelerate": Launcher("accelerate", _accelerate, unequal=False),
    "slurm": Launcher("torchrun", _torchrun, unequal=True),  # srun instead of ssh
}
