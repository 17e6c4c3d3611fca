"""Torch's process group: how the ranks of a run find each other."""

import datetime
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from ...errors import UserError
from ...errors.console import counted
from ..host.cluster import World
from . import devices, exchange, one_host, supervised, tell
from .process import this_process

# How long to wait for all ranks to appear, and then for each other: one may download or tokenise for a long time.
RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=60)
PATIENCE = 15  # seconds after which a host says that it waits for others
_WAITS = "brigade/waits"  # in its store: how often a rank came to a wait_for_all
_RUN = "brigade/run"  # in its store: the name of the launch
ENDED = "brigade/ended"  # in its store: which rank ended at once, by a signal


def store_of_all() -> Store:
    """The store of all ranks of the run, whether or not they are divided into replicas."""
    return this_process.store or _get_default_store()


def join(world: World) -> None:
    """Make the group, once all ranks are here. On GPU hosts it has NCCL for GPU tensors and gloo for CPU ones, so that agreement
    between ranks never depends on a healthy NCCL."""
    # With fewer GPUs than ranks preflight.check_host says so, and needs a group to say it in; so does devices.check where the
    # driver is too old: torch counts GPUs by NVML also then (torch/cuda/__init__.py: device_count).
    device = devices.index(world)
    if device is not None:
        torch.cuda.set_device(device)  # of this thread: any other one begins with the first GPU
    backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
    this_process.agent.note(stage="waiting")
    impatient = threading.Timer(PATIENCE, tell.that_it_waits, [world, PATIENCE, RENDEZVOUS_TIMEOUT])
    impatient.daemon = True
    impatient.start()
    try:
        dist.init_process_group(backend, timeout=RENDEZVOUS_TIMEOUT, **_met())
    finally:
        impatient.cancel()
    # torch's own name for it, which it deprecates where it has the public one.
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(COLLECTIVE_TIMEOUT)
    _check_places(exchange.gather_in_group((world.host, world.local_rank, world.local_size)))
    this_process.agent.note(stage="joined")
    this_process.signals.join(lambda by: _tell_that_it_is_ended(world, by))


def _check_places(places: list[tuple[str, int, int]]) -> None:
    """Raise UserError, the same on all ranks, where those of a host are not as its environment says: they would leave files of a
    checkpoint to others that are not there. places: (host, LOCAL_RANK, LOCAL_WORLD_SIZE) of each rank; without the last, as
    world_from_environment() takes it"""
    for host in dict.fromkeys(host for host, _, _ in places):
        numbers = sorted(number for of, number, _ in places if of == host)
        told = {size for of, _, size in places if of == host}
        if told == {len(numbers)} and numbers == [*range(len(numbers))]:
            continue
        sizes = " and ".join(map(str, sorted(told)))
        problem = f"{len(numbers)} of {counted(len(places), 'rank')} are here, with LOCAL_RANK {', '.join(map(str, numbers))}, "
        problem += f"and LOCAL_WORLD_SIZE is {sizes}"
        cure = "start them by `python -m brigade launch` or one torchrun for each host, and give each host a name of its own; or "
        cure += "export LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, and end all where one ends (srun --kill-on-bad-exit=1)"
        raise UserError(f"host {host}", problem, cure)


def _met() -> dict[str, Any]:
    """The store, rank and size with which to make the group. Of several hosts that no `launch` watches: what torch does."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if one_host.has_all_ranks(os.environ):
        met = _of_this_launch(one_host.first_meeting(os.environ, RENDEZVOUS_TIMEOUT))
        return met | {"store": one_host.meet(met["store"], met["rank"], met["world_size"], RENDEZVOUS_TIMEOUT)}
    return _of_this_launch() if os.environ.get(supervised.RUN) else {}


def _of_this_launch(store: Store | None = None) -> dict[str, Any]:
    """The launcher's store, rank and size, once rank 0 is known to belong to the same launch. store: as rank 0 has it already

    Raise RuntimeError where another launch's rank 0 answers."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        store, rank, size = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    name = os.environ.get(supervised.RUN, "")
    if name and rank == 0:
        store.set(_RUN, name)
    elif name:
        other = store.get(_RUN).decode()
        if other != name:
            raise RuntimeError(f"the rank 0 that answers there belongs to another launch ({other}, and this is {name})")
    return {"store": store, "rank": rank, "world_size": size}


def wait_for_all() -> None:
    """Wait until every rank is here, without a clock: one host may download or tokenise for hours while the others have
    it in their caches, and a collective would give up after COLLECTIVE_TIMEOUT. It is the launcher that notices a dead rank."""
    # Where the run is divided into replicas, those of this one.
    store, size, pause = _get_default_store(), dist.get_world_size(), 0.002
    came = store.add(_WAITS, 1)
    all_here = -(-came // size) * size  # nobody comes to the next wait before all have come to this one
    while came < all_here:
        if one_host.rank_0_is_gone():
            raise RuntimeError("rank 0 has ended")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
        came = store.add(_WAITS, 0)


def _tell_that_it_is_ended(world: World, by: str) -> None:
    # Where the store ended with rank 0, or the ranks part at this moment, nobody is left to be told.
    with suppress(RuntimeError, ValueError):
        store_of_all().set(ENDED, f"rank {world.rank} on {world.host} was ended by {by}")
