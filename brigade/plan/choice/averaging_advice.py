"""Advise replicas that average their weights every so many steps, where each step would wait for the network."""

from collections.abc import Callable
from dataclasses import replace

from ...errors import UserError
from ...errors.console import counted, figure
from ...train.recipe.objectives import SFT
from ..constants import CONSTANTS
from ..costs.communication import held, round_seconds, sent
from ..costs.estimate import Estimate, estimate
from ..costs.job import Replicas
from ..costs.memory import GIB
from ..hardware.network import links
from .goals import Answer, answer
from .job_of_recipe import RecipePlan, job_of


def for_recipe(plan: RecipePlan) -> list[str]:
    """Return one sentence at most, for a recipe on its own cluster."""
    training = plan.settings.recipe.training
    longest = training.max_steps if training.max_steps > 0 else max(CONSTANTS.replica_every)

    def with_replicas() -> Estimate | None:
        changed = training.model_copy(update={"sync_every": CONSTANTS.replica_every[0]})
        recipe = plan.settings.recipe.model_copy(update={"training": changed})
        try:
            return estimate(job_of(replace(plan.settings, recipe=recipe), plan.link, asked=plan.asked))
        except UserError:  # it does not go with this recipe (train/strategy/replicas.py)
            return None

    return _advice(plan.estimate, plan.strategy_name, with_replicas, longest)


def for_model(found: Answer) -> list[str]:
    """Return one sentence at most: replicas would train with the strategy that is chosen inside a host."""
    workload, cluster, winner = found.workload, found.cluster, found.winner or found.slow

    def with_replicas() -> Estimate | None:
        batch, rest = divmod(workload.batch, cluster.nodes)
        if rest or cluster.all or workload.images or workload.objective != SFT:
            return None
        choices = tuple(choice for choice in workload.choices if not choice.axes and choice.offload != "nvme")
        one_host = replace(workload, batch=batch, choices=choices)
        try:
            inside = answer(one_host, replace(cluster, nodes=1)).winner
        except UserError:  # the host's batch does not divide over its GPUs
            return None
        return estimate(replace(inside.estimate.job, replicas=Replicas(cluster.nodes))) if inside else None

    return _advice(winner.estimate, winner.name, with_replicas) if winner else []


def _advice(plain: Estimate, name: str, changed: Callable[[], Estimate | None], longest: int = 10**9) -> list[str]:
    """Return one sentence at most.

    changed: the estimate with replicas, or None where there can be none; longest: steps that a round may have
    """
    if plain.job.replicas.count > 1 or plain.time.across <= CONSTANTS.replica_waits * plain.time.total:
        return []
    other = changed()
    if other is None or not other.fits:
        return []
    without = other.time.total - other.time.synchronising
    every, slower = 0, 0.0
    for every in (number for number in CONSTANTS.replica_every if number <= longest):
        job = replace(other.job, replicas=replace(other.job.replicas, every=every))
        slower = estimate(job, other.gpu).time.total / without
        if slower <= CONSTANTS.replica_most:
            break
    if not every or slower * without > plain.time.total:
        return []
    gbit = links(plain.gpu, plain.job.link, plain.job.node_size).gbit
    return [
        f"At {gbit:g} Gbit/s: sync_every {every} takes {slower:.2f}x the step of a fast network "
        f"({name}: {plain.time.total / without:.1f}x)."
    ]


def described(result: Estimate) -> str:
    """Say what the averaging of an estimate takes: `2 of 8 GPUs meet every 50 steps: 3.10 GB leave a host in 2.1 s, and ...`"""
    job, replicas = result.job, result.job.replicas
    network, beside = round_seconds(job, result.gpu)
    return (
        f"{replicas.count} of {counted(job.gpus // replicas.count, 'GPU')} meet every {counted(int(replicas.every), 'step')}: "
        f"{sent(job) / 1e9:.2f} GB leave a host in {figure(network, 1)} s, and {figure(beside, 1)} s besides, "
        f"{figure(result.time.synchronising, 2)} s of a step; {held(job) / GIB:.1f} GiB of a host's memory. "
        "No run was compared with this"
    )
