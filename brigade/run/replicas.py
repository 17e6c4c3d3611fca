"""A run whose ranks are divided into replicas, which train by themselves."""

from dataclasses import replace

from ..distributed import ranks, replicas
from . import leftovers, mark
from .directory import RECORD, Run, write_whole


def divide(run: Run) -> Run:
    """From here on each replica is a run of its own ranks, with a directory for its checkpoints. A collective of all ranks."""
    if run.world.replicas > 1:
        from ..distributed.elastic import ElasticPeers

        ranks.peers = ElasticPeers(run.world)
        return run
    own = replace(run, world=run.replica, directory=run.own_directory, shared=run.shared or run.replica.hosts == 1)
    writes = own.world.rank == 0 or (own.world.local_rank == 0 and not own.shared)
    with ranks.agreed(run.world):
        if own.world.replica and writes:
            own.directory.mkdir(exist_ok=True)
            leftovers.remove(own.directory)
            write_whole(own.directory / RECORD, (run.directory / RECORD).read_text())
            write_whole(own.directory / mark.FILE, run.mark)
    replicas.divide(run.replica, run.strategy.replicas)
    return own
