"""Explain why each strategy was not chosen, and what is the least to change where none fits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...errors.console import counted, figure
from ...errors.tables import table
from ..costs.job import Job
from ..costs.memory import GIB
from ..costs.step_time import cpu_adam_seconds
from ..hardware import catalogue, gpu
from ..hardware.network import links
from .search import MUCH, NEAR, candidates, chosen, undivided
from .workload import WITH_LIGER, Candidate, Cluster, Workload, named

SLOW_GBIT = 400  # between nodes, below which gathering weights across them in every micro-step is what a step waits for
LIGER = "Liger's kernels (--liger, use_liger_kernel)"
LIGHTER = table(Path(__file__).with_name("lighter.yaml"))


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
    if not candidate.recommended and not candidate.choice.why_only:
        return f"possible and slow: {why_slow(candidate)}"
    if candidate.choice.why_only:
        against = f", {_longer(candidate.seconds / winner.seconds)}" if winner else ""
        return f"estimate only: {candidate.choice.why_only}{against}"
    assert winner is not None  # what fits and can be run was there to choose from
    untold = not_weighed(candidate, winner)
    if untold:
        return untold
    if candidate.lighter and not winner.lighter and candidate.seconds < winner.seconds:
        return f"faster by formula, but 8-bit moments are for what fits in no other way, or is {MUCH} times as fast"
    if candidate.choice.unproven and candidate.seconds < winner.seconds:
        at_worst = _longer(candidate.slow_seconds / winner.seconds)
        return f"faster by formula, but few published runs have such axes: at the slow end {at_worst}"
    if candidate.seconds <= NEAR * winner.seconds and candidate.choice.rank > winner.choice.rank:
        return f"as fast, but {winner.name} is {'preferred' if winner.choice.axes else 'simpler'}"
    ratio, other = candidate.seconds / winner.seconds, winner.estimate.job
    longer = _longer(ratio)
    share, waits = _longest_wait(candidate)
    if share > 0.1:
        return f"{longer}: {waits}"
    why = ""
    if result.job.checkpointing == "full" and other.checkpointing == "none":
        why = ": it computes layers again"
    elif candidate.kernels != winner.kernels:
        why = f": {candidate.kernels} against {winner.kernels}"
    elif result.job.micro_batch < other.micro_batch:
        why = f": micro-batch {result.job.micro_batch} against {other.micro_batch}"
    return longer + why


def _longest_wait(candidate: Candidate) -> tuple[float, str]:
    """Return what a step waits for most: (its share of the step, a sentence)."""
    result = candidate.estimate
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
    share = waits[most] / candidate.seconds
    return share, f"{share:.0%} of its step waits {most}"


def why_slow(candidate: Candidate) -> str:
    """Return why a strategy is possible and no more."""
    through_disks = candidate.estimate.job.offload == "nvme"
    return "its states go through the hosts' disks" if through_disks else _longest_wait(candidate)[1]


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
    if ratio >= 2:
        return f"{ratio:.1f}x the time"
    return f"{ratio - 1:.0%} more time" if ratio > 1 else f"{1 - ratio:.0%} less time"


def not_weighed(candidate: Candidate, winner: Candidate) -> str:
    """Return why offload is not taken although it is faster by formula; "" where it is not faster, or was compared."""
    instead = candidate.choice.offload and not winner.choice.offload
    if not instead or candidate.weighed or candidate.seconds >= winner.seconds:
        return ""
    if candidate.estimate.job.method != "full":
        return "not taken: its speed is a formula's, which no run with frozen weights has shown"
    flag, what = ("--nvme", "disk") if candidate.choice.offload == "nvme" else ("--host_memory", "memory")
    return f"faster by formula, but the hosts' {what} is not known: give {flag}"


def left_out(workload: Workload) -> str:
    """Return a sentence that says along which axes nothing divides such a model, and why; "" where all do."""
    by_why: dict[str, list[str]] = {}
    for axis, name in {"tensor": "tensor groups", "sequence": "sequence groups", "stages": "pipelines"}.items():
        by_why.setdefault(undivided(workload.shape, axis), []).append(name)
    said = ", ".join(f"{' and '.join(names)} ({why})" for why, names in by_why.items() if why)
    return f" Not among them: {said}." if said else ""


def smallest_change(workload: Workload, cluster: Cluster) -> str:
    """Return the least change with which something fits and is not slow.

    Another strategy than one that was named, more GPUs or nodes, more memory in each host, GPUs with more that do without
    offload, shorter sequences, fused kernels, LoRA or QLoRA; where it is the network that is waited for also fewer nodes, a
    faster network or a larger batch. "" where none of them is enough.
    """
    ranked, device = candidates(workload, cluster), gpu(cluster.gpu)

    def on(**changes: Any) -> tuple[Cluster, Workload]:
        return replace(cluster, **changes), workload

    def training(**changes: Any) -> tuple[Cluster, Workload]:
        return cluster, replace(workload, **changes)

    sizes = (2, 4, 8) if cluster.nodes == 1 else ()
    larger = {f"{n} GPUs instead of {cluster.node_size}": on(node_size=n) for n in sizes if n > cluster.node_size}
    more = (2**power for power in range(1, 7))
    larger |= {f"{n} nodes instead of {cluster.nodes}": on(nodes=n, all=0) for n in more if n > cluster.nodes}
    has = cluster.host_gib or device.host_gib * cluster.node_size
    lacks = any("--host_memory" in candidate.refused for candidate in ranked)
    memories = [gib for gib in (2**power for power in range(6, 12)) if lacks and gib > has]
    kinds = {entry["memory_gib"]: kind for kind, entry in reversed(catalogue().items()) if "sustained" in entry}
    kept = tuple(choice for choice in workload.choices if not choice.offload)
    lengths = [length for halvings in range(1, 20) if (length := workload.length >> halvings) >= 512]
    trained = workload.trained or workload.shape.parameters // 200
    every = named([], workload.optimizer or Job.optimizer)
    groups = [
        {"another strategy (leave --strategy out)": training(choices=every, asked=False)} if workload.asked else {},
        larger,
        {f"{gib:,} GiB of memory in each host instead of {has:,.0f}": on(host_gib=gib) for gib in memories},
        {
            f"{kind} instead of {device.kind}": (replace(cluster, gpu=kind), replace(workload, choices=kept))
            for memory, kind in sorted(kinds.items())
            if memory > 1.2 * device.memory_gib and not cluster.link.startswith("NVL")
        },
        {f"sequences of {n:,} tokens instead of {workload.length:,}": training(length=n) for n in lengths},
        {LIGER: training(kernels=WITH_LIGER)} if workload.kernels != WITH_LIGER else {},
        {way: training(method=name, trained=trained) for name, way in LIGHTER.get(workload.method, {}).items()},
    ]
    if cluster.nodes > 1 and any(candidate.fits for candidate in ranked):  # it is slow, and waits for the network
        now, usual = (links(device, link, cluster.node_size).gbit for link in (cluster.link, ""))
        batches = (4 * workload.batch, 16 * workload.batch)
        groups[2:2] = [
            {f"{counted(n, 'node')} instead of {cluster.nodes}": on(nodes=n, all=0) for n in reversed(cluster.fewer)},
            {f"{usual:,.0f} Gbit/s between nodes instead of {now:,.0f}": on(link="")} if usual > now else {},
            {f"{n:,} sequences a step instead of {workload.batch:,}": training(batch=n) for n in batches},
        ]

    def fits(cluster: Cluster, workload: Workload) -> bool:
        batch = math.ceil(workload.batch / cluster.gpus) * cluster.gpus
        try:
            return chosen(candidates(replace(workload, batch=batch), cluster)) is not None
        except UserError:  # images do not go with it
            if workload.images:
                return False
            raise

    found = (next((way for way, changed in group.items() if fits(*changed)), "") for group in groups)
    return " or ".join(filter(None, found))
