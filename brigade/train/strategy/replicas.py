"""Replicas that train independently and meet every `sync_every` steps: how many a run has, and what cannot be one."""

from dataclasses import replace

from ...errors import UserError
from ...errors.console import counted
from ..host.cluster import World
from ..recipe.settings import Settings
from .axes import Axes
from .deepspeed_config import swaps_to_nvme
from .strategy import Strategy

OF_NESTEROV = ("outer_learning_rate", "outer_momentum")


def inside(strategy: Strategy, settings: Settings, world: World, changed: list[str]) -> Strategy:
    """The Strategy of each replica, where the run has several.

    changed: keys of replicas that do not have their defaults. Raise UserError where they do not go together, with each other or
    with the strategy.
    """
    _check_keys(settings, strategy.axes, strategy.source, changed)
    if strategy.ds_config and swaps_to_nvme(strategy.ds_config):
        problem = "sync_every averages weights in memory, and here they lie on NVMe"
        raise UserError(strategy.source, problem, "use a ds_config without NVMe offload")
    replicas, kind = count(settings, world, strategy.replicate), strategy.kind
    if kind in ("single", "ddp"):
        kind = "single" if world.of_all_replicas == replicas else "ddp"
        hook = settings.recipe.training.ddp_comm_hook
        if kind == "single" and world.of_all_replicas > 1 and hook != "none":
            problem = f"{hook} compresses what the ranks of a replica send in each step, and here each replica is a single rank"
            cure = "leave it out; sync_precision: bf16 or int8 compresses what replicas send"
            raise UserError(settings.place("ddp_comm_hook"), problem, cure)
    elif kind == "hsdp" and replicas == strategy.replicate and settings.recipe.training.sync_replica == "auto":
        kind = "fsdp2"
    return replace(strategy, kind=kind, replicas=replicas)


def count(settings: Settings, world: World, groups: int) -> int:
    """How many replicas the ranks of a run are divided into.

    groups: of HSDP, which are its replicas; else 1. Raise UserError where there is only one replica.
    """
    training = settings.recipe.training
    if world.replicas > 1:  # `launch --elastic` has divided them
        if training.sync_replica == "rank" or groups > 1 or training.sync_fragments > 1:
            key = "sync_fragments" if training.sync_fragments > 1 else "sync_replica"
            problem = f"{key} is {getattr(training, key)}, but of an elastic run each host is a replica, which sends all at once"
            raise UserError(settings.place(key), problem, "leave the key out, or launch without --elastic")
        return world.replicas
    many_hosts = 1 < world.local_size < world.size
    unit = training.sync_replica
    if unit == "auto" and groups > 1:
        replicas = groups
    elif unit == "host" or (unit == "auto" and many_hosts):
        replicas, rest = divmod(world.size, world.local_size)
        if rest:
            problem = (
                f"{counted(world.size, 'rank')} on hosts of different sizes: a replica has as many ranks as any other"
            )
            raise UserError(settings.place("sync_replica"), problem, "give all hosts the same number of slots")
    else:
        replicas = world.size
    unknown = world.launcher == "lint" and world.size == 1  # no file says how many ranks there will be
    if replicas < 2 and not settings.rehearse and not unknown:
        there = f"{counted(world.size, 'rank')} on {counted(world.hosts, 'host')}"
        finer = ", set sync_replica: rank" if world.size > 1 else ""
        cure = f"start more ranks or hosts{finer}, or leave sync_every out"
        raise UserError(settings.place("sync_every"), f"{there}: a single replica has nobody to meet", cure)
    return max(1, replicas)


def check_length(settings: Settings, steps: int, epoch: int) -> None:
    """Raise UserError where replicas would go through an epoch or the whole run, of so many steps, without meeting."""
    every = settings.recipe.training.sync_every or 1
    if every > min(steps, epoch):
        length = f"the run has {counted(steps, 'step')}" if steps <= epoch else f"an epoch has {counted(epoch, 'step')}"
        problem = f"sync_every is {every}, but {length}: the replicas would go through it without meeting"
        raise UserError(settings.place("sync_every"), problem, f"set it to {min(steps, epoch)} at most")


def _check_keys(settings: Settings, axes: Axes, source: str, changed: list[str]) -> None:
    """Raise UserError for keys of replicas without sync_every, and for what cannot be averaged."""
    training = settings.recipe.training
    if training.sync_every is None:
        problem = f"{changed[0]} is {getattr(training, changed[0])}, but without sync_every nothing is averaged"
        raise UserError(settings.place(changed[0]), problem, "set sync_every: 50, or leave the key out")
    of_nesterov = [key for key in changed if key in OF_NESTEROV]
    if of_nesterov and training.outer_optim == "average":
        key = of_nesterov[0]
        problem = f"{key} is {getattr(training, key)}, and outer_optim average has no such thing"
        raise UserError(settings.place(key), problem, "set outer_optim: nesterov, or leave the key out")
    if training.sync_fragments > training.sync_every:
        problem = f"{training.sync_fragments} fragments in {counted(training.sync_every, 'step')}: each needs a step of its own"
        raise UserError(settings.place("sync_fragments"), problem, f"set it to {training.sync_every} at most")
    if axes:
        problem = f"sync_every averages weights that DDP, ZeRO or FSDP2 keeps, not what {axes} divides"
        raise UserError(source, problem, "leave one of the two out")
