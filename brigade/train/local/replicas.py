"""A run whose ranks are divided into replicas, which train independently."""

from __future__ import annotations

from dataclasses import replace

from ..distributed import consistency, ranks
from ..host import files
from ..recipe.schema import computed, flat
from ..run import mark, on_disk, versions
from ..run.directory import RECORD, Run
from . import coordinator
from . import peers as replicas
from .elastic import ElasticPeers
from .entrance import Message


def divide(run: Run) -> Run:
    """Divide the ranks of a run into its replicas. Return the run of this rank's replica, which has a directory for its own
    checkpoints. A collective of all ranks."""
    if run.world.replicas > 1:
        elastic = ElasticPeers(run.world, _runs(run) if run.world.rank == 0 else {})
        ranks.divided_by(elastic)
        return replace(run, peers=elastic)
    # Where hosts have directories of their own, each replica lies on one host (directory.claim).
    own = replace(run, world=run.replica, directory=run.own_directory, shared=True)
    with ranks.agreed(run.world):
        if own.world.replica and own.world.rank == 0:
            own.directory.mkdir(exist_ok=True)
            on_disk.remove_leftovers(own.directory)
            files.write(own.directory / RECORD, files.read(run.directory / RECORD))
            files.write(own.directory / mark.FILE, run.mark)
    peers = replicas.divide(run.replica, run.strategy.replicas)
    ranks.divided_by(peers)
    return replace(own, peers=peers)


def _runs(run: Run) -> Message:
    """What the replicas of an elastic run must have alike, {name: value}: each is a launch of its own, and may be started again
    after its clone has changed. Batches and kernels may differ, as hosts may."""
    return {coordinator.COMMIT: versions.git_commit()} | flat(
        {
            "versions": versions.of_packages(),
            "code": consistency.code(),
            "recipe": computed(run.settings.before_proofs),
            "strategy": {"kind": run.strategy.kind},
            **{name: run.same[name] for name in run.same.keys() - {"recipe", "strategy", "batch", "replicas"}},
        }
    )
