"""Count what replicas take that train independently and average weights every so many steps.

Each rank sends its part of a replica's weights to the ranks with its place in the others, and gets the means: an all-to-all, then
gloo's allgather, which is a ring (gloo/allgather.cc). Of n replicas with one on each host, 2 (n - 1) / n of the weights leave a
host (docs/evidence/local-training.md counts them).
"""

from ..constants import CONSTANTS
from ..hardware import Gpu
from ..hardware.network import links
from .job import Job


def part(job: Job) -> float:
    """Return how many values a rank averages: an equal part of what a replica trains."""
    return (job.trained or job.shape.parameters) * job.replicas.count / job.gpus


def sent(job: Job) -> float:
    """Return the bytes that leave a host's network cards in a round.

    Its ranks share the cards; what goes to a replica on the same host does not leave it, and a ring leaves it once.
    """
    n, ranks = job.replicas.count, min(job.node_size, job.gpus)
    if job.nodes == 1:
        return 0.0
    here = max(1.0, ranks * n / job.gpus)  # replicas on a host
    exchanged, gathered = (n - here) / n, (n - 1) / n / here
    return ranks * part(job) * CONSTANTS.replica_width[job.replicas.precision] * (exchanged + gathered)


def round_seconds(job: Job, g: Gpu) -> tuple[float, float]:
    """Return (seconds in which a round's weights cross the network, seconds of all else that all ranks wait for at its end)."""
    n, own = job.replicas.count, part(job)
    line = links(g, job.link, job.node_size).node * CONSTANTS.replica_exchanges
    socket = 2 * (n - 1) / n * own * CONSTANTS.replica_width[job.replicas.precision] / CONSTANTS.gloo_socket
    # One all-to-all; the means; what the replicas wish and what they log, each a gather of sizes and one of values.
    hops = CONSTANTS.tcp_hop * (1 + 5 * (n - 1)) * (job.nodes > 1)
    # Under DDP the ranks of a replica then reduce fp32 weights over all of them (train/local/outer.py: _exchange).
    ranks = job.gpus // n
    spread = 8 * (ranks - 1) * own / CONSTANTS.gloo_socket if job.engine == "ddp" else 0.0
    return max(sent(job) / line, socket), CONSTANTS.replica_seconds * own + hops + spread


def synchronising(job: Job, g: Gpu, step: float) -> float:
    """Return the seconds that averaging adds to each step. step: seconds without it; fragments are sent behind it"""
    replicas = job.replicas
    if replicas.count == 1:
        return 0.0
    network, beside = round_seconds(job, g)
    behind = step * min(CONSTANTS.replica_overlap, replicas.every // replicas.fragments) * (replicas.fragments > 1)
    waits = replicas.fragments * max(0.0, network / replicas.fragments - behind)
    return (waits + beside) / replicas.every


def held(job: Job) -> float:
    """Return the bytes of host memory that averaging takes on a node at most."""
    if job.replicas.count == 1:
        return 0.0
    each = CONSTANTS.replica_kept[job.replicas.outer] + CONSTANTS.replica_buffers / job.replicas.fragments
    return each * part(job) * min(job.node_size, job.gpus)


def written(job: Job) -> float:
    """Return the bytes that all replicas add to a checkpoint: the momentum, and with fragments each one's own weights."""
    each = 4 * (job.replicas.outer == "nesterov") + 4 * (job.replicas.fragments > 1)
    return each * part(job) * job.gpus
