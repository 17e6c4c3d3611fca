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
from .job import Job, Loss, Method
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
class Wanted:
    """What to train: sequences of `length` tokens, `batch` of them per optimizer step.

    trained: parameters of adapters and of `whole`, modules trained whole beside them; 0 for all weights
    asked: what `plan --method` calls the method, "" for that of the same name
    margin: share of each card to leave free
    choices, micro_batches, kernels (keys of KERNELS), optimizer: what the search is among
    """

    shape: ModelShape
    length: int = 4096
    batch: int = 128
    method: Method = "full"
    asked: str = ""
    trained: int = 0
    attended: float = 0
    kernels: tuple[str, ...] = INSTALLED
    margin: float = 0.05
    choices: tuple[Choice, ...] = CHOICES
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    optimizer: str = "adamw_torch_fused"
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


def compiles(wanted: Wanted, choice: Choice) -> bool:
    """Whether compiled layers are proven to compute what plain ones do (tests/ranks/test_compile.py)."""
    return wanted.method == "full" and not (wanted.shape.experts or choice.only or choice.offload)


def jobs(wanted: Wanted, cluster: Cluster, choice: Choice, names: str) -> Iterator[Job]:
    """The configurations of one strategy, with the kernels of that name."""
    node, (kernels, loss) = cluster.node_size, KERNELS[names]
    shape, attention = wanted.shape, attention_of(wanted.shape)
    tensor, expert, context = (node if choice.inside == kind else 1 for kind in ("tensor", "expert", "context"))
    stages = cluster.nodes if choice.pipeline else 1
    data = cluster.gpus // tensor // context // stages
    for micro in wanted.micro_batches:
        if wanted.batch % (micro * data):
            continue
        for checkpointing in ("none", "full"):
            yield Job(
                shape,
                wanted.length,
                micro,
                wanted.batch // micro // data,
                method=wanted.method,
                engine=choice.engine,
                stage=choice.stage,
                data=data,
                tensor=tensor,
                pipeline=stages,
                expert=expert,
                context=context,
                attended=wanted.attended,
                attention=attention,
                shard=node if choice.group and choice.engine == "fsdp2" else 0,
                hpz=node if choice.group and choice.engine == "zero" else 0,
                quantised=choice.quantised,
                offload=choice.offload,
                checkpointing=checkpointing,
                kernels=kernels,
                loss=loss,  # type: ignore[arg-type]
                trained=wanted.trained,
                dora=wanted.asked.endswith("dora"),
                optimizer=wanted.optimizer,
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


def candidates(wanted: Wanted, cluster: Cluster, traces: Traces = by_formula) -> list[Candidate]:
    """Each strategy's best: the fastest configuration that fits, at its interval's upper end if there is one, or where none
    does the one that lacks least. Best first.

    traces: the trace of a configuration that takes the formulas' place, if it has one
    """
    gpu(cluster.gpu)
    if wanted.batch % cluster.gpus:
        near = math.ceil(wanted.batch / cluster.gpus) * cluster.gpus
        raise UserError(
            "global batch", f"{wanted.batch} sequences do not divide over {cluster.gpus} GPUs", f"use {near}"
        )
    best = []
    for choice in wanted.choices:
        if not possible(wanted.shape, cluster, choice):
            continue
        found = [
            Candidate(
                choice, names, estimate(job, traced=traces(job)), wanted.margin, trap(job) or lacks_host(job, cluster)
            )
            for names in wanted.kernels
            if names != "torch.compile" or compiles(wanted, choice)
            for job in jobs(wanted, cluster, choice, names)
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


def smallest_change(wanted: Wanted, cluster: Cluster, traces: Traces = by_formula) -> str:
    """What is the least to change where nothing fits: more nodes, shorter sequences, fused kernels, LoRA or QLoRA; "" if
    none of them does."""
    ways = []
    for size in (2, 4, 8) if cluster.nodes == 1 else ():
        more = replace(cluster, node_size=size)
        if size > cluster.node_size and chosen(
            candidates(replace(wanted, batch=-(-wanted.batch // size) * size), more, traces)
        ):
            ways.append(f"{size} GPUs instead of {cluster.node_size}")
            break
    for nodes in () if ways else (2, 4, 8, 16, 32, 64):
        if nodes > cluster.nodes:
            more = replace(cluster, nodes=nodes)
            batch = math.ceil(wanted.batch / more.gpus) * more.gpus
            if chosen(candidates(replace(wanted, batch=batch), more, traces)):
                ways.append(f"{nodes} nodes instead of {cluster.nodes}")
                break
    length = wanted.length // 2
    while length >= 512:
        if chosen(candidates(replace(wanted, length=length), cluster, traces)):
            ways.append(f"sequences of {length:,} tokens instead of {wanted.length:,}")
            break
        length //= 2
    if wanted.kernels != ("Liger",) and chosen(candidates(replace(wanted, kernels=("Liger",)), cluster, traces)):
        ways.append("Liger's kernels (--liger, use_liger_kernel)")
    adapters = replace(wanted, trained=wanted.trained or wanted.shape.parameters // 200)
    lighter: dict[Method, list[tuple[Method, str]]] = {
        "full": [("lora", "LoRA instead of training all weights"), ("qlora", "QLoRA instead of training all weights")],
        "lora": [("qlora", "QLoRA instead of LoRA")],
        "qlora": [],
    }
    without = [(wanted.method, "adapters without DoRA")] if wanted.asked.endswith("dora") else []
    for method, what in [*without, *lighter[wanted.method]]:
        if chosen(candidates(replace(adapters, method=method, asked=""), cluster, traces)):
            ways.append(what)
            break
    return " or ".join(ways)
