"""The choice: every strategy, micro-batch, checkpointing and set of kernels for one model on one cluster, and why each lost."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...errors import UserError
from ...errors.console import figure
from ..costs.hardware import gpu
from ..costs.host_memory import host
from ..costs.memory import GIB
from ..costs.network import links
from ..costs.step_time import cpu_adam_seconds
from ..models.layer import EAGER, FUSED, Kernels
from ..models.shape import ModelShape
from ..models.traced_activations import Traced
from .estimate import Estimate, estimate
from .job import Job, Loss, of_method
from .job_of_run import attention_of
from .strategies import CHOICES, Choice

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
KERNELS: dict[str, tuple[Kernels, Loss]] = {
    "torch": (EAGER, "released"),
    "torch.compile": (FUSED, "online"),
    "Liger": (FUSED, "fused"),
}
INSTALLED = ("torch", "torch.compile")  # Liger's are a package that requirements.txt leaves out
NEAR = 1.05  # as fast as the fastest, for whom the simpler one is preferred
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

Traces = Callable[[Job], Traced | None]


def by_formula(job: Job) -> None:
    """No trace of any job."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind on `nodes` nodes of `node_size`.

    link: the network's name or rate, "" for the kind's usual one
    host_gib, nvme_gb: memory and local disks of a node, 0 for what is usual
    """

    gpu: str
    node_size: int
    nodes: int
    link: str = ""
    host_gib: float = 0.0
    nvme_gb: float = 0.0

    @property
    def gpus(self) -> int:
        return self.node_size * self.nodes


@dataclass(frozen=True)
class Workload:
    """What to train: sequences of `length` tokens, `batch` of them per optimizer step.

    method: a key of METHODS
    trained: parameters of adapters of `rank` and of `whole`, modules trained whole beside them; 0 for all weights
    margin: share of each card to leave free
    choices, micro_batches, kernels (keys of KERNELS), optimizer: what the search is among
    """

    shape: ModelShape
    length: int = 4096
    batch: int = 128
    method: str = "full"
    trained: int = 0
    attended: float = 0
    kernels: tuple[str, ...] = INSTALLED
    margin: float = 0.05
    choices: tuple[Choice, ...] = CHOICES
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    optimizer: str = "adamw_torch_fused"
    rank: int = 16
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A strategy with its best micro-batch, checkpointing and kernels. refused: why it is not to be taken, whatever it needs."""

    choice: Choice
    kernels: str
    estimate: Estimate
    margin: float
    refused: str = ""

    @property
    def seconds(self) -> float:
        return self.estimate.time.total

    @property
    def fits(self) -> bool:
        return self.estimate.spare_gib >= self.margin * self.estimate.gpu.memory_gib and not self.refused


def compiles(workload: Workload, choice: Choice) -> bool:
    """Whether compiled layers are proven to compute what plain ones do (tests/ranks/test_compile.py)."""
    return workload.method == "full" and not (workload.shape.experts or choice.only or choice.offload)


def jobs(workload: Workload, cluster: Cluster, choice: Choice, names: str) -> Iterator[Job]:
    """The configurations of one strategy, with the kernels of that name."""
    node, (kernels, loss) = cluster.node_size, KERNELS[names]
    shape, attention = workload.shape, attention_of(workload.shape)
    tensor, expert, context = (node if choice.inside == kind else 1 for kind in ("tensor", "expert", "context"))
    stages = cluster.nodes if choice.pipeline else 1
    data = cluster.gpus // tensor // context // stages
    for micro in workload.micro_batches:
        if workload.batch % (micro * data):
            continue
        for checkpointing in ("none", "full"):
            yield Job(
                shape,
                workload.length,
                micro,
                workload.batch // micro // data,
                engine=choice.engine,
                stage=choice.stage,
                data=data,
                tensor=tensor,
                pipeline=stages,
                expert=expert,
                context=context,
                attended=workload.attended,
                attention=attention,
                shard=node if choice.group and choice.engine == "fsdp2" else 0,
                hpz=node if choice.group and choice.engine == "zero" else 0,
                quantised=choice.quantised,
                offload=choice.offload,
                checkpointing=checkpointing,
                kernels=kernels,
                loss=loss,  # type: ignore[arg-type]
                trained=workload.trained,
                **of_method(workload.method),
                optimizer=workload.optimizer,
                gpu=cluster.gpu,
                node_size=node,
                link=cluster.link,
            )


def lacks_host(job: Job, cluster: Cluster) -> str:
    """What the nodes' memory or disks are too small for, or ""."""
    usual, needs = gpu(cluster.gpu), host(job)
    memory = cluster.host_gib or usual.host_gib * cluster.node_size
    disk = cluster.nvme_gb or usual.nvme_gb * cluster.node_size
    most, when = max((needs.training, "train"), (needs.loading, "load"))
    if most / GIB > memory:
        return f"to {when}, each host needs {most / GIB:,.0f} GiB of memory, of {memory:,.0f} (--host_memory)"
    if needs.swapped / 1e9 > disk:
        return f"each host needs {needs.swapped / 1e9:,.0f} GB of local disk, of {disk:,.0f} (--nvme)"
    return ""


def trap(job: Job) -> str:
    """Why what would fit is not to be taken, or ""."""
    if job.shape.experts and job.engine == "zero" and job.stage == 3:
        return "may hang, as ranks route to different experts (lint: recipe-moe-zero3)"
    return ""


def possible(shape: ModelShape, cluster: Cluster, choice: Choice) -> bool:
    """Whether there is anything to shard, replicate or divide in that way."""
    if cluster.gpus == 1 and (choice.engine == "fsdp2" or (choice.stage and not choice.offload)):
        return False
    if (choice.group or choice.inside) and cluster.node_size == 1:
        return False
    if (choice.group or choice.pipeline) and cluster.nodes == 1:
        return False
    if choice.pipeline and shape.layers % cluster.nodes:
        return False
    divided = {"tensor": shape.heads, "expert": shape.experts}.get(choice.inside, cluster.node_size)
    return divided > 0 and divided % cluster.node_size == 0


def candidates(workload: Workload, cluster: Cluster, traces: Traces = by_formula) -> list[Candidate]:
    """Each strategy's best: the fastest configuration that fits, at its interval's upper end if there is one, or where none
    does the one that lacks least. Best first.

    traces: the trace of a configuration that takes the formulas' place, if it has one
    """
    gpu(cluster.gpu)
    if workload.batch % cluster.gpus:
        near = math.ceil(workload.batch / cluster.gpus) * cluster.gpus
        raise UserError(
            "global batch", f"{workload.batch} sequences do not divide over {cluster.gpus} GPUs", f"use {near}"
        )
    best = []
    for choice in workload.choices:
        if not possible(workload.shape, cluster, choice):
            continue
        found = [
            Candidate(
                choice, names, estimate(job, traced=traces(job)), workload.margin, trap(job) or lacks_host(job, cluster)
            )
            for names in workload.kernels
            if names != "torch.compile" or compiles(workload, choice)
            for job in jobs(workload, cluster, choice, names)
        ]
        if not found:  # no micro-batch that was asked for divides the batch
            continue
        fitting = [candidate for candidate in found if candidate.fits]
        fitting = [candidate for candidate in fitting if candidate.estimate.safe] or fitting
        best.append(
            min(fitting, key=lambda c: c.seconds) if fitting else max(found, key=lambda c: c.estimate.spare_gib)
        )
    return sorted(best, key=lambda c: (not c.fits, c.seconds if c.fits else -c.estimate.spare_gib))


def chosen(ranked: list[Candidate]) -> Candidate | None:
    """The simplest strategy that is within 5 % of the fastest of those that fit safely, else of those that fit; None where
    nothing does.

    Offload is for what fits in no other way: it lives on the host's memory and cores, which nobody has described here.
    """
    fitting = [candidate for candidate in ranked if candidate.fits and not candidate.choice.only]
    fitting = [candidate for candidate in fitting if not candidate.choice.offload] or fitting
    fitting = [candidate for candidate in fitting if candidate.estimate.safe] or fitting
    if not fitting:
        return None
    near = [candidate for candidate in fitting if candidate.seconds <= NEAR * fitting[0].seconds]
    return min(near, key=lambda c: (c.choice.rank, c.seconds))


def reason(candidate: Candidate, winner: Candidate | None) -> str:
    """Why it is not the one: what it lacks, or what its step waits for."""
    if candidate is winner:
        return "chosen"
    result = candidate.estimate
    if candidate.refused:
        return candidate.refused
    if not candidate.fits:
        parts = {name: getattr(result.memory, name) for name in result.memory.__dataclass_fields__}
        largest = max(parts, key=lambda name: parts[name])
        lacks = candidate.margin * result.gpu.memory_gib - result.spare_gib
        return f"out of memory by {figure(lacks, 0)} GiB: {largest} take {parts[largest] / GIB:.0f}"
    if candidate.choice.only:
        against = f", {candidate.seconds / winner.seconds - 1:+.0%} time" if winner else ""
        return f"estimate only: {candidate.choice.why_only}{against}"
    if winner and winner.estimate.safe and not result.safe:
        return f"may not fit: up to {result.memory_interval()[1] + result.context / GIB:.0f} GiB"
    if winner and candidate.choice.offload and not winner.choice.offload and candidate.seconds < winner.seconds / NEAR:
        return f"faster by formula, but offload is for what fits in no other way, and {winner.choice.name} does"
    if winner is None or (candidate.seconds <= NEAR * winner.seconds and candidate.choice.rank > winner.choice.rank):
        return f"as fast, but {winner.choice.name if winner else 'another'} is simpler"
    network, gbit = "for the network", links(result.gpu, result.job.link, result.job.node_size).gbit
    if result.job.stage == 3 and not candidate.choice.group and gbit < SLOW_GBIT:
        network += f": every micro-step gathers all weights over {gbit:.0f} Gbit/s, which wants {SLOW_GBIT}"
    adam = cpu_adam_seconds(result.job)
    waits = {
        network: result.time.across,
        "for the links inside a node": result.time.inside,
        "for the CPU's Adam": adam,
        "for offloaded states": result.time.offload - adam,
        "for Python to launch kernels": result.time.launches,
        "in the optimizer": result.time.optimizer,
    }
    most = max(waits, key=lambda name: waits[name])
    ratio, other = candidate.seconds / winner.seconds, winner.estimate.job
    longer = f"{ratio:.1f}x the time" if ratio >= 2 else f"{ratio - 1:.0%} more time"
    share = waits[most] / candidate.seconds
    if share > 0.1:
        return f"{longer}: {share:.0%} of its step waits {most}"
    if result.job.checkpointing == "full" and other.checkpointing == "none":
        return f"{longer}: it computes layers again"
    if candidate.kernels != winner.kernels:
        return f"{longer}: {candidate.kernels} against {winner.kernels}"
    if result.job.micro_batch < other.micro_batch:
        return f"{longer}: micro-batch {result.job.micro_batch} against {other.micro_batch}"
    return longer


def smallest_change(workload: Workload, cluster: Cluster, traces: Traces = by_formula) -> str:
    """What is the least to change where nothing fits: more GPUs or nodes, shorter sequences, fused kernels, LoRA or QLoRA; "" if
    none of them does."""
    sizes = [size for size in (2, 4, 8) if size > cluster.node_size] if cluster.nodes == 1 else []
    clusters = {f"{size} GPUs instead of {cluster.node_size}": replace(cluster, node_size=size) for size in sizes}
    for nodes in (2, 4, 8, 16, 32, 64):
        if nodes > cluster.nodes:
            clusters[f"{nodes} nodes instead of {cluster.nodes}"] = replace(cluster, nodes=nodes)
    lengths = [length for halvings in range(1, 20) if (length := workload.length >> halvings) >= 512]
    adapters = replace(workload, trained=workload.trained or workload.shape.parameters // 200)
    ways: list[dict[str, tuple[Workload, Cluster]]] = [  # of each the first that fits
        {
            what: (replace(workload, batch=math.ceil(workload.batch / more.gpus) * more.gpus), more)
            for what, more in clusters.items()
        },
        {
            f"sequences of {length:,} tokens instead of {workload.length:,}": (
                replace(workload, length=length),
                cluster,
            )
            for length in lengths
        },
        {LIGER: (replace(workload, kernels=("Liger",)), cluster)} if workload.kernels != ("Liger",) else {},
        {
            what: (replace(adapters, method=method), cluster)
            for method, what in LIGHTER.get(workload.method, {}).items()
        },
    ]
    found = (next((what for what, one in way.items() if chosen(candidates(*one, traces))), "") for way in ways)
    return " or ".join(filter(None, found))
