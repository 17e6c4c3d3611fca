"""Each host's own local launcher: the exact command that `launch` starts there."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import UserError
from ..hosts.job import Job
from ..train.recipe.files import REPOSITORY
from ..train.recipe.program import RUNNER, STORY
from .write import text

_TORCHRUN = (
    "torchrun --nnodes {hosts} --nproc_per_node {slots} --node_rank {number}"
    " --master_addr {address} --master_port {port}"
)
# Program (beside this interpreter) and arguments; {hostfile} and {accelerate.yaml} are of files().
LAUNCHERS = {
    "deepspeed": "deepspeed --hostfile {hostfile} --no_ssh --node_rank {number}"
    " --master_addr {address} --master_port {port}",
    "torchrun": _TORCHRUN,
    "accelerate": "accelerate launch --config_file {accelerate.yaml} --machine_rank {number}"
    " --main_process_ip {address} --main_process_port {port}",
    "slurm": _TORCHRUN,  # srun instead of ssh
}


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
        return {"accelerate.yaml": text("accelerate", job, launched=True)}
    return {}


def program(launcher: str) -> str:
    """The program's name, for messages."""
    return LAUNCHERS[launcher].split()[0]


def command(launcher: str, job: Job, place: Place) -> list[str]:
    """The words that start the ranks of one host, with {name} for what files() gives."""
    values = asdict(place) | {"hosts": len(job.hosts), "slots": list(job.hosts.values())[place.number]}
    name, *arguments = LAUNCHERS[launcher].split()
    filled = [str(values.get(word.strip("{}"), word)) for word in arguments]
    words = job.train_arguments
    started = [REPOSITORY / STORY] if job.script is None else [RUNNER, Path(job.script).absolute()]
    here = Path.cwd() == REPOSITORY
    script = [
        str(path.relative_to(REPOSITORY) if here and path.is_relative_to(REPOSITORY) else path) for path in started
    ]
    if launcher == "accelerate":
        words = [*words, *job.named_again("{accelerate.yaml}")]
    return [str(Path(sys.executable).parent / name), *filled, *script, *words]


def choose(job: Job, named: str | None, in_slurm: bool) -> str:
    """The launcher that was named, or the strategy's own: deepspeed for ZeRO, else torchrun. Raises UserError where it
    cannot start this job."""
    launcher = named or ("slurm" if in_slurm else "deepspeed" if job.strategy.is_deepspeed else "torchrun")
    if launcher not in LAUNCHERS:
        known = ", ".join(LAUNCHERS)
        raise UserError(f"flag --launcher {launcher}", "there is no such launcher", f"use one of: {known}")
    if launcher == "accelerate" and len(set(job.hosts.values())) > 1:
        slots = ", ".join(f"{host} {number}" for host, number in list(job.hosts.items())[:4])
        problem = f"hosts have different numbers of slots ({slots}), and {launcher} counts the same on all"
        cure = "use --launcher torchrun or deepspeed, or give all hosts the same slots"
        raise UserError(f"{job.hostfile}", problem, cure)
    return launcher
