"""Explain why each strategy was not chosen, and what is the least to change where none fits."""

import math
from dataclasses import replace

from ...errors import UserError
from ...errors.console import figure
from ..costs.memory import GIB
from ..costs.step_time import cpu_adam_seconds
from ..hardware.network import links
from .search import MUCH, NEAR, candidates, chosen
from .workload import WITH_LIGER, Candidate, Cluster, Workload

SLOW_GBIT = 400  # between nodes, below which gathering weights across them in every micro-step is what a step waits for
LIGER = "Liger's kernels (--liger, use_liger_kernel)"
# Method -> lighter ones, the least change first.
_QLORA = {"qlora": "QLoRA instead of LoRA"}
LIGHTER = {
    "full": {"lora": "LoRA instead of training all weights", "qlora": "QLoRA instead of training all weights"},
    "lora": _QLORA,
    "rslora": _QLORA,
    "dora": {"lora": "adapters without DoRA"} | _QLORA,
    "qdora": {"qlora": "adapters without DoRA"},
}


def reason(candidate: Candidate, winner: Candidate | None) -> str:
    """Return why a candidate is not the one: what it lacks, or what its step waits for."""
    if candidate is winner:
        return "chosen"
    result = candidate.estimate
    if candidate.refused:
        return candidate.refused
    if not candidate.keeps_margin:
        parts = vars(result.memory)
        largest, kept = max(parts, key=parts.__getitem__), candidate.margin * result.gpu.memory_gib
        if result.may_fit:
            return f"would leave {result.spare_gib:.1f} GiB free, less than the margin of {kept:.1f} (--margin)"
        lacks = f"{figure(-result.spare_gib, 0 if result.spare_gib < -1 else 1)} GiB"
        words = {"optimizer": "the optimizer's states", "reference": "the reference's weights"}
        take = words.get(largest, largest)
        return f"out of memory by {lacks}, and {kept:.1f} of margin: {take} take {parts[largest] / GIB:.0f}"
    if not candidate.fits:
        return f"may not fit: up to {result.most_gib:.0f} of {result.gpu.memory_gib:.0f} GiB"
    if candidate.choice.why_only:
        against = f", {_longer(candidate.seconds / winner.seconds)}" if winner else ""
        return f"estimate only: {candidate.choice.why_only}{against}"
    assert winner is not None  # what fits and can be run was there to choose from
    untold = not_weighed(candidate, winner)
    if untold:
        return untold
    if candidate.lighter and not winner.lighter and candidate.seconds < winner.seconds:
        return f"faster by formula, but 8-bit moments are for what fits in no other way, or is {MUCH} times as fast"
    if candidate.seconds <= NEAR * winner.seconds and candidate.choice.rank > winner.choice.rank:
        return f"as fast, but {winner.name} is {'preferred' if winner.choice.axes else 'simpler'}"
    network, gbit = "for the network", links(result.gpu, result.job.link, result.job.node_size).gbit
    if result.job.stage == 3 and not candidate.choice.group and gbit < SLOW_GBIT:
        network += f": every micro-step gathers all weights over {gbit:.0f} Gbit/s, which wants {SLOW_GBIT}"
    adam = cpu_adam_seconds(result.job, result.gpu)
    waits = {
        network: result.time.across,
        "for the links inside a node": result.time.inside,
        "for the CPU's Adam": adam,
        "for offloaded states": result.time.offload - adam,
        "for the pipeline to fill and drain": result.time.bubble,
        "for Python to launch kernels": result.time.launches,
        "in the optimizer": result.time.optimizer,
    }
    most = max(waits, key=waits.__getitem__)
    ratio, other = candidate.seconds / winner.seconds, winner.estimate.job
    longer = _longer(ratio)
    share = waits[most] / candidate.seconds
    if share > 0.1:
        return f"{longer}: {share:.0%} of its step waits {most}"
    why = ""
    if result.job.checkpointing == "full" and other.checkpointing == "none":
        why = ": it computes layers again"
    elif candidate.kernels != winner.kernels:
        why = f": {candidate.kernels} against {winner.kernels}"
    elif result.job.micro_batch < other.micro_batch:
        why = f": micro-batch {result.job.micro_batch} against {other.micro_batch}"
    return longer + why


def too_much(candidate: Candidate) -> str:
    """Return in a few words what a candidate that does not fit needs too much of: `12 GiB too much`."""
    result = candidate.estimate
    if candidate.refused:
        return "too little memory or disk on its hosts" if "host" in candidate.refused else "too large while it loads"
    lacks = (candidate.margin - 1) * result.gpu.memory_gib + result.device_gib
    if not candidate.keeps_margin:
        return f"{figure(lacks, 0 if lacks >= 1 else 1)} GiB too much"
    return f"up to {result.most_gib:.0f} GiB"


def _longer(ratio: float) -> str:
    """Say how much longer it takes: `1.5x the time`, `20% more time`. ratio: of one time to another"""
    if abs(ratio - 1) < 0.005:
        return "as fast"
    return (
        f"{ratio:.1f}x the time"
        if ratio >= 2
        else f"{ratio - 1:.0%} more time"
        if ratio > 1
        else f"{1 - ratio:.0%} less time"
    )


def not_weighed(candidate: Candidate, winner: Candidate) -> str:
    """Return why offload is not taken although it is faster by formula; "" where it is not faster, or was compared."""
    if (
        not candidate.choice.offload
        or candidate.weighed
        or winner.choice.offload
        or candidate.seconds >= winner.seconds
    ):
        return ""
    if candidate.estimate.job.method != "full":
        return "not taken: its speed is a formula's, which no run with frozen weights has shown"
    flag, what = ("--nvme", "disk") if candidate.choice.offload == "nvme" else ("--host_memory", "memory")
    return f"faster by formula, but the hosts' {what} is not known: give {flag}"


def smallest_change(workload: Workload, cluster: Cluster) -> str:
    """Return the least change with which something fits: more GPUs or nodes, shorter sequences, fused kernels, LoRA or QLoRA.

    "" where none of them is enough.
    """
    clusters = {}
    for size in (2, 4, 8):
        if cluster.nodes == 1 and size > cluster.node_size:
            clusters[f"{size} GPUs instead of {cluster.node_size}"] = replace(cluster, node_size=size)
    for nodes in (2, 4, 8, 16, 32, 64):
        if nodes > cluster.nodes:
            clusters[f"{nodes} nodes instead of {cluster.nodes}"] = replace(cluster, nodes=nodes)
    lengths = [length for halvings in range(1, 20) if (length := workload.length >> halvings) >= 512]
    shorter = {
        f"sequences of {length:,} tokens instead of {workload.length:,}": replace(workload, length=length)
        for length in lengths
    }
    trained = workload.trained or workload.shape.parameters // 200
    lighter = {
        way: replace(workload, method=name, trained=trained) for name, way in LIGHTER.get(workload.method, {}).items()
    }

    def fits(cluster: Cluster, workload: Workload) -> bool:
        batch = math.ceil(workload.batch / cluster.gpus) * cluster.gpus
        try:
            return chosen(candidates(replace(workload, batch=batch), cluster)) is not None
        except UserError:  # images do not go with it
            if workload.images:
                return False
            raise

    ways = [
        next((way for way, larger in clusters.items() if fits(larger, workload)), ""),
        next((way for way, changed in shorter.items() if fits(cluster, changed)), ""),
        LIGER if workload.kernels != WITH_LIGER and fits(cluster, replace(workload, kernels=WITH_LIGER)) else "",
        next((way for way, changed in lighter.items() if fits(cluster, changed)), ""),
    ]
    return " or ".join(filter(None, ways))
