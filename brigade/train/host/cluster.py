"""The place of this process among the ranks of the run, as the launcher has put it into the environment."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import UserError


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks of the run.

    launcher: "python" (nothing started us), "torchrun", "deepspeed", "accelerate" or "environment" (variables of none of these)
    host_count: 0 where the launcher gives none
    replica: the number of these ranks' replica, where a run has several that train independently (see part())
    replicas: how many an elastic run has, each of which is started by itself (launch/elastic.py); else 1
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    host: str
    launcher: str
    host_count: int = 0
    replica: int = 0
    replicas: int = 1

    @property
    def hosts(self) -> int:
        """Number of hosts; where the launcher does not tell, each is assumed to run as many ranks as this one."""
        return self.host_count or max(1, self.size // self.local_size)

    @property
    def is_main_rank(self) -> bool:
        """Whether this rank prints and writes. In an elastic run each replica has one that does, with a directory of its own."""
        return self.rank == 0 and (self.replica == 0 or self.replicas > 1)

    @property
    def of_all_replicas(self) -> int:
        """Number of ranks, including those of replicas that are started by themselves."""
        return self.size * self.replicas

    @property
    def number(self) -> int:
        """Number of this rank among those of all replicas, as its launcher counts."""
        return self.replica * self.size + self.rank

    def part(self, parts: int) -> "World":
        """Return the world of this rank's replica, where the ranks are divided, in order, into so many equal parts: on one host,
        on some, or on parts of two."""
        size = self.size // parts
        if parts == 1 or self.replicas > 1:
            return replace(self, replica=0)
        replica, rank = divmod(self.rank, size)
        before, from_here = (
            min(self.local_rank, rank),
            min(self.local_size - self.local_rank, size - rank),
        )  # on this host
        first, last = replica * size // self.local_size, ((replica + 1) * size - 1) // self.local_size
        return World(rank, before, size, before + from_here, self.host, self.launcher, last - first + 1, replica)


# This rank's number on its host, where LOCAL_RANK says which GPU is its: the only one that it sees (step/environment.py).
OWN_NUMBER = "BRIGADE_LOCAL_RANK"
ELASTIC = "BRIGADE_ELASTIC"  # `launch --elastic` tells each replica its number, how many there are, and where they meet
# Variables by which launchers are known, in this order: torchrun's is set under accelerate too.
# How many tasks a starter of tasks has begun, which torch reads nothing of.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SIGNS = {"ACCELERATE_MIXED_PRECISION": "accelerate", "TORCHELASTIC_RUN_ID": "torchrun", "CROSS_SIZE": "deepspeed"}


def world_from_environment(env: Mapping[str, str] | None = None) -> World:
    """Read what torchrun, deepspeed or accelerate put into the environment.

    deepspeed says LOCAL_SIZE where torchrun says LOCAL_WORLD_SIZE; accelerate launch is torchrun with
    ACCELERATE_MIXED_PRECISION set. Without RANK nothing launched us: one process, one device.

    Raises UserError for what is no number, and for one of several tasks of srun or mpirun without RANK: each would train alone.
    """
    env = os.environ if env is None else env
    host = socket.gethostname()
    if not env.get("RANK") or not env.get("WORLD_SIZE"):
        tasks = next((name for name in _TASKS if _number(env, name, 1) > 1), None)
        if tasks:
            problem = "this is one of several tasks, and no RANK says which: each would train by itself"
            cure = "start them by `python -m brigade launch` or one torchrun for each host; or, to train in this task alone, "
            raise UserError(f"{tasks}={env[tasks]}", problem, f"{cure}unset {tasks}")
        return World(0, 0, 1, 1, host, "python")
    size = _number(env, "WORLD_SIZE")
    launcher = next((launcher for name, launcher in _SIGNS.items() if name in env), "environment")
    local_size = _number(env, "LOCAL_WORLD_SIZE", _number(env, "LOCAL_SIZE", size))
    hosts = _number(env, "GROUP_WORLD_SIZE", _number(env, "CROSS_SIZE"))
    local_rank = _number(env, OWN_NUMBER, _number(env, "LOCAL_RANK"))
    world = World(_number(env, "RANK"), local_rank, size, local_size, host, launcher, hosts)
    return of_elastic_run(world, env)


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    """The number that a variable holds; the default where it is empty or not set. Raises UserError for anything else."""
    value = env.get(name, "").strip() or str(default)
    if not value.isdecimal():
        raise UserError(
            f"{name}={value}", "it is not a whole number from 0", f"export {name} as the launcher should set it"
        )
    return int(value)


def of_elastic_run(world: World, env: Mapping[str, str]) -> World:
    """Return the world of a replica that `launch --elastic` has started; any other as it is."""
    told = json.loads(env[ELASTIC]) if ELASTIC in env else {}
    return replace(world, replica=told["replica"], replicas=told["replicas"]) if told else world
