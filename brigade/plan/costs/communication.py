"""Count the seconds of what ranks send each other in a step: between layers, between stages, and of data parallelism."""

import functools
from typing import NamedTuple

from ..constants import CONSTANTS
from ..hardware import Gpu
from ..hardware.network import Links, links
from .division import Stage, division, gathered_bytes
from .job import Job
from .layer import exchanged_width


@functools.singledispatch
def between_layers(job: Job, net: Links, again: bool) -> float:
    """Return the seconds per layer and micro-batch that tensor, sequence and expert groups take to exchange activations."""
    seconds = tensor_seconds(job, net)
    if job.context > 1:
        seconds += ulysses_seconds(job, net, again)
    if job.expert > 1:
        seconds += _experts(job, net, again)
    return seconds


def tensor_seconds(job: Job, net: Links, more: int = 0) -> float:
    """Return the seconds per layer and micro-batch that a tensor group takes.

    Sums over ranks after attention and MLP, and the same backward: each is a gather and a scatter, eight halves in all.
    Computing whole layers again adds four. more: further halves
    """
    if job.tensor == 1:
        return 0.0
    halves = 8 + 4 * (job.checkpointing == "full") + more
    return halves * net.half(2 * job.shape.hidden * job.tokens, job.tensor)


def _experts(job: Job, net: Links, again: bool) -> float:
    """Return the seconds per layer and micro-batch of sending each token to its experts and back, and the same backward.

    A token goes to each of its experts, and once more where layers are computed again. Groups are of neighbours, and each rank
    of a tensor group sends its part of their tokens, which they then gather.
    """
    tokens, share = 2 * job.shape.hidden * job.tokens, job.shape.moe_layers / job.shape.layers
    once = 2 * net.exchange(tokens * job.shape.top_k / job.tensor, job.expert) + net.half(tokens, job.tensor)
    return (2 + again) * once * share


@functools.singledispatch
def border_seconds(job: Job, net: Links, cut: int = 1) -> float:
    """Return the seconds per step in which activations and gradients cross a stage's border: each tensor rank sends all of them.

    cut: ranks of a tensor group that send a part each
    """
    if job.pipeline == 1:
        return 0.0
    sent = (4 if job.autocast else 2) * job.shape.hidden * job.tokens / cut
    return 2 * net.send(sent, job.tensor * job.context * job.data, job.pipeline) * job.accumulation * job.virtual


def ulysses_seconds(job: Job, net: Links, again: bool) -> float:
    """Return the seconds per layer and micro-batch of exchanging heads (Jacobs et al. 2023, arXiv 2309.14509, section 3.2).

    Queries, keys and values are exchanged before attention and its output after it, the same backward, and once more where that
    is computed again.
    """
    once = net.exchange(2 * exchanged_width(job) * job.tokens / job.tensor, job.context, job.tensor)
    return (2 + again) * (once + CONSTANTS.call_latency)  # two calls each way


class Shared(NamedTuple):
    """Parameters that data-parallel ranks share.

    trained: those among them with gradients; sharing: ranks that shard one copy; holding: ranks that hold them; stride: how far
    apart these are
    """

    parameters: float
    trained: float
    sharing: int
    holding: int
    stride: int


def shared_parts(job: Job, stage: Stage) -> list[Shared]:
    """Return what the ranks of a stage share: ranks with the same experts have groups of their own."""
    ranks, full = job.data * job.context, job.method == "full"
    dense = stage.parameters - stage.experts
    parts_of_stage = [Shared(dense, stage.trained - stage.experts * full, job.shard_ranks, ranks, job.tensor)]
    if stage.experts:
        parts = division(job)
        stride = job.expert * parts.expert_stride
        parts_of_stage.append(Shared(stage.experts, stage.experts * full, *parts.same_experts, stride))
    return parts_of_stage


@functools.singledispatch
def data_seconds(job: Job, net: Links, forward: float, backward: float, stage: Stage) -> float:
    """Return the seconds per step of data-parallel communication that computing does not hide.

    forward, backward: seconds per micro-batch that a stage computes or waits for Python
    """
    engine, m, layers = job.conventions, job.accumulation, job.shape.layers / job.pipeline
    if job.stage >= 3:
        gather, scatter, across = sharding_seconds(job, net, stage)
        scatters = scatter * engine.scatters_hidden  # behind computing
        exposed = m * (max(0.0, gather - forward) + max(0.0, gather + scatters - backward)) + 2 * gather / layers
        exposed += m * (scatter - scatters)
        exposed += max(0.0, across - max(0.0, backward - gather - scatters))
        return exposed + CONSTANTS.contention * m * min(2 * gather + scatters + across / m, forward + backward)
    reduce = gather = 0.0
    for part in shared_parts(job, stage):
        calls = max(1.0, engine.reduced * part.trained / engine.bucket) if engine.bucket else layers
        whole = job.stage == 0 or engine.everywhere
        payload = engine.reduced * part.trained / calls
        reduce += calls * (net.all_reduce if whole else net.half)(payload, part.holding, part.stride)
        if job.stage:
            gather += gather_seconds(job, net, part, calls)
    if job.stage == 2:
        reduce *= m
    hidden = min(reduce, engine.hidden * backward * (m if job.stage == 2 else 1))
    return reduce - hidden + gather


def gathering_seconds(job: Job, net: Links, forward: float, stage: Stage) -> float:
    """Return the seconds per micro-batch of gathering sharded weights for a forward pass that computing does not hide.

    forward: seconds per micro-batch that the pass computes or waits for Python
    """
    if job.stage < 3:
        return 0.0
    gather, _, _ = sharding_seconds(job, net, stage)
    return max(0.0, gather - forward) + gather / job.shape.layers + CONSTANTS.contention * min(gather, forward)


@functools.singledispatch
def gather_seconds(job: Job, net: Links, part: Shared, calls: float) -> float:
    """Return the seconds in which so many collectives gather stepped weights."""
    return calls * net.half(job.conventions.gathered * part.trained / calls, part.holding, part.stride)


def sharding_seconds(job: Job, net: Links, stage: Stage) -> tuple[float, float, float]:
    """Return the seconds that ranks which shard weights take (to gather them once, to scatter a micro-batch's gradients, to sum
    these up over copies at the step's end)."""
    engine, m, layers = job.conventions, job.accumulation, job.shape.layers / job.pipeline
    gathered = gathered_bytes(job, stage.parameters) / max(stage.parameters, 1)
    # ZeRO++ (arXiv 2306.10209, table 1): half of the weights' bytes and a quarter of the gradients'.
    gather = scatter = across = 0.0
    for psi, trained, sharing, holding, stride in shared_parts(job, stage):
        weights, reduced = gathered * psi / layers, engine.reduced / (4 if job.quantised else 1)
        calls = layers * engine.collectives
        once = calls * net.half(weights / engine.collectives / (2 if job.quantised else 1), sharing, stride)
        if job.hpz:  # the first gather of a step fills the node's own copy, from which the others come
            once = (once + (2 * m - 1) * calls * net.half(weights / engine.collectives, job.hpz, stride)) / (2 * m)
        gather += once
        scatter += calls * net.half(reduced * trained / calls, sharing, stride)
        kept = engine.reduced * trained / sharing / layers
        across += layers * net.all_reduce(kept, holding // sharing, stride * sharing)
    return gather, scatter, across


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
    """Return (seconds in which a round's weights cross the network, other seconds that all ranks wait for at its end)."""
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
    """Return the seconds that averaging adds to each step. step: seconds without it; fragments are sent while it runs"""
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
