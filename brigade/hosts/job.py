"""A job: one recipe on one cluster, as `launch` starts it and `launch --write` writes it for others to start."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import UserError
from ..errors.tables import table
from ..train.host.cluster import World, of_elastic_run
from ..train.recipe import flags
from ..train.recipe.batch import batch_arithmetic
from ..train.recipe.files import find, text_of
from ..train.recipe.hostfile import read_hostfile
from ..train.recipe.program import check_code, digests_of, function_files
from ..train.recipe.settings import Settings
from ..train.strategy import Strategy, accelerate_config, choose


@dataclass(frozen=True)
class Job:
    """One recipe on one cluster.

    recipe: as the user named it; flags: further words for train.py, as given
    hosts: host -> slots (ranks), in order; the first host is the main one
    hostfile: where they came from, as the user named it, or None (Slurm)
    settings, strategy: what train.py will make of recipe and flags with that many ranks
    replica: which one of an elastic run this is
    script: the file that is started in place of train.py, as the user named it (`launch --script`); None: train.py
    """

    recipe: str
    flags: tuple[str, ...]
    hosts: dict[str, int]
    hostfile: str | None
    settings: Settings
    strategy: Strategy
    replica: int = 0
    script: str | None = None

    @property
    def world_size(self) -> int:
        return sum(self.hosts.values())

    @property
    def output_dir(self) -> Path:
        """The directory in which train.py puts the run."""
        return self.settings.directory(self.strategy.name)

    @property
    def train_arguments(self) -> list[str]:
        """The words after train.py."""
        return ["--recipe", self.recipe, *self.flags]

    def texts(self) -> dict[str, str]:
        """{absolute path: text} of the files that say what runs: the recipe, and the configs that it or a flag names."""
        keys = ("ds_config", "accelerate_config", "hostfile")
        named = {key: getattr(self.settings.recipe.cluster, key) for key in keys}
        if named["accelerate_config"] is not None:
            named["its ds_config"] = accelerate_config.read(named["accelerate_config"], "").ds_config
        files = [(key, name) for key, name in named.items() if isinstance(name, str)]
        paths = [
            self.settings.recipe_path,
            *(find(name, self.settings.sources.get(key, key), key) for key, name in files),
        ]
        return {str(path.absolute()): text_of(path) for path in paths}

    def own_code(self) -> dict[str, str]:
        """Digests of the user's Python files that the job runs, by their names; of a file that cannot be read, none."""
        paths = [*function_files(self.settings).values(), *([self.script] if self.script else [])]
        return digests_of(path for path in paths if os.access(Path(path).expanduser(), os.R_OK))

    def named_again(self, file: str) -> list[str]:
        """Words by which train.py learns of axes, of which accelerate's launcher hands little on. file: accelerate's"""
        by_flag = any(word.partition("=")[0] in ("--ds_config", "--accelerate_config") for word in self.flags)
        if not self.strategy.axes or by_flag:
            return []
        if self.strategy.is_deepspeed:
            return ["--ds_config", json.dumps(self.strategy.ds_config)]
        return ["--accelerate_config", file]


def make(
    recipe: str,
    flag_words: list[str],
    hostfile: str | None,
    hosts: dict[str, int] | None = None,
    script: str | None = None,
) -> Job:
    """The job that a command line asks for, with everything checked that can be checked without asking a host.

    hostfile: None takes the recipe's own; hosts: known already (Slurm), no hostfile is read; script: as Job has it
    Raises UserError for whatever train.py would refuse at once, more ranks than sequences in a global batch among it.
    """
    settings = flags.load(["--recipe", recipe, *flag_words])
    check_code(settings)
    place = "flag --hostfile"
    if hosts is None:
        if hostfile is None:
            hostfile, place = settings.recipe.cluster.hostfile, settings.place("hostfile")
        if hostfile is None:
            problem = "no hostfile is given, and the recipe names none"
            raise UserError(place, problem, "add --hostfile hostfiles/2x8, or your own")
        hosts = read_hostfile(find(hostfile, place, "hostfile"))
    size = sum(hosts.values())
    first = next(iter(hosts))
    world = of_elastic_run(World(0, 0, size, hosts[first], first, "launch"), os.environ)
    strategy = choose(settings, world, env={})
    batch_arithmetic(
        settings.recipe.training, strategy.axes.data(world.of_all_replicas), settings.place("global_batch_size")
    )
    return Job(recipe, tuple(flag_words), hosts, hostfile, settings, strategy, world.replica, script)


def hosts_of_slurm_job(env: Mapping[str, str]) -> dict[str, int]:
    """Hosts and slots of the Slurm allocation that this process runs in: one slot per GPU, else per task of a node.

    Raises UserError outside of an allocation.
    """
    nodes = env.get("SLURM_JOB_NODELIST")
    if not nodes:
        problem = "this shell is in no Slurm allocation (SLURM_JOB_NODELIST is not set)"
        raise UserError("launcher slurm", problem, "salloc first, or submit a script: --write sbatch")
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        said = f"it cannot be started: {error.strerror}" if isinstance(error, OSError) else error.stderr.strip()
        raise UserError("scontrol show hostnames", said, "is Slurm's client installed on this host?") from None
    asked = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE")
    slots = next((env[name] for name in asked if env.get(name)), "1")
    kinds = (kind.rpartition(":")[2] for kind in slots.split(","))  # "8", "h100:8" or "a100:4,v100:4"
    return dict.fromkeys(listed, sum(map(int, kinds)))


def forwarded(env: Mapping[str, str], extra: list[str]) -> dict[str, str]:
    """The variables of the launching shell, `env`, that the ranks of all hosts get: those that forwarded.yaml lists.

    `deepspeed` hands on only NCCL_*, PYTHON*, MV2*, UCX* and MLFLOW*, so that HF_HOME or a proxy holds on the first host only
    (ArcticTraining #316); handing on everything would take one host's own settings to all others (a Slurm job's, a session's).

    extra: further names, as given with --env

    Raises UserError for a name that env does not have, and for NAME=VALUE: every user of a host reads its command lines.
    """
    patterns = table(Path(__file__).with_name("forwarded.yaml"))
    for word in extra:
        name, equals, _ = word.partition("=")
        if equals:
            problem = "a value on a command line can be read by every user of this host"
            raise UserError(f"flag --env {name}=...", problem, f"export {name}, then give --env {name}")
        if name not in env:
            raise UserError(f"flag --env {name}", f"{name} is not set here", f"export {name}")

    def matches(name: str, group: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns[group])

    travels = {name for name in env if matches(name, "forwarded") and not matches(name, "kept")}
    return {name: value for name, value in env.items() if name in travels.union(extra)}
