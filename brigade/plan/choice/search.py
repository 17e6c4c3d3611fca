"""Search every strategy, micro-batch, checkpointing and set of kernels for one model on one cluster."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from ...errors import UserError
from ...errors.tables import Fields, table
from ...train.model.experts import shards
from ...train.strategy.axes import Axes
from ...train.strategy.axis_rules import crosses_hosts, uneven_parts
from ...train.strategy.axis_rules import problem as misfit
from ..costs.estimate import estimate
from ..costs.host_memory import host, whole_on_gpu
from ..costs.job import Job, axis_fields, method_fields
from ..costs.memory import GIB
from ..hardware import Gpu, gpu
from ..shape.model_shape import ModelShape
from .job_of_run import EXPERTS_UNDER_DDP, attention_of, divisible
from .workload import KERNELS, WITH_LIGER, Candidate, Choice, Cluster, Workload, runs

LIGHTER = ("adamw_8bit", "paged_adamw_8bit")  # optimizers with less to keep, the faster first
NEAR = 1.05  # as fast as the fastest, for whom the simpler one is preferred
# Times as fast with 8-bit moments as with the usual optimizer, from where on they are taken although that fits.
MUCH = 1.3

UNDIVIDED = table(Path(__file__).with_name("undivided.yaml"))


def undivided(shape: ModelShape, axis: str) -> str:
    """Return why a model is not divided along an axis; "" where it may be."""
    for key, why in UNDIVIDED[axis].items():
        without, _, attribute = key.rpartition(" ")
        if bool(attrgetter(attribute)(shape)) != bool(without):
            return str(why)
    return ""


def taken(workload: Workload, choice: Choice, names: str, bf16: bool = True) -> bool:
    """Return whether train.py takes a strategy with the kernels of that name.

    It takes compiled layers where they are proven to compute what plain ones do (tests/ranks/test_compile.py), and a loss in
    tiles where one rank has the whole head. bf16: whether it computes in bf16, and not in fp16
    """
    compiled, liger = names == "torch.compile", names in WITH_LIGER
    shape = workload.shape
    unproven = any((workload.method != "full", shape.experts, shape.mixer, shape.sizes, not bf16))
    if compiled and (unproven or choice.why_only or choice.offload or choice.axes):
        return False
    # train.py computes no loss in tiles where the model changes logits (train/loss/tiled.py).
    changed = shape.family.capped or shape.family.scaled
    tiled = KERNELS[names][1] == "tiled"
    if tiled and ({"tensor", "stages"} & set(choice.axes) or changed):
        return False
    method = workload.method.removeprefix("rs")
    facts = {
        "optim": workload.optimizer or Job.optimizer,
        "bf16": bf16,
        "fp16": not bf16,
        "torch_compile": compiled,
        "use_liger_kernel": liger,
        "objective": workload.objective,
        "tiled_loss": tiled,
        "images": bool(workload.images),
    }
    return runs(choice, method=method, **facts)


def divisions(workload: Workload, cluster: Cluster, choice: Choice) -> Iterator[Axes]:
    """Yield the sizes of a strategy's axes that the model, the batch and the cluster allow.

    They are powers of two and the number of nodes. Tensor and sequence groups stay inside a node; each rank of a pipeline has one
    stage or two.
    """
    if workload.length < choice.least_length:
        return
    shape, gpus = workload.shape, cluster.gpus
    columns = {"queries": shape.query_width, "keys": shape.key_value_width // 2, "feed-forward": shape.ffn}
    columns |= {} if shape.tied else {"vocabulary": shape.vocab}
    powers = {2**power for power in range(1, gpus.bit_length())}

    def sizes(axis: str) -> list[int]:
        found = powers | ({cluster.nodes} - {1} if axis == "stages" else set())
        whole = [*divisible(shape, axis), *([workload.sequence] if axis == "sequence" else [])]
        return sorted(size for size in found if not any(number % size for number in whole))

    for chosen_sizes in itertools.product(*map(sizes, choice.axes)):
        named: Fields = dict(zip(choice.axes, chosen_sizes, strict=True))
        axes = Axes(**named)
        inside = cluster.node_size % (axes.tensor * axes.sequence) == 0 and not crosses_hosts(axes, cluster.node_size)
        if not inside or misfit(axes, gpus) or (choice.group and axes.tensor == cluster.node_size):
            continue
        copies = cluster.nodes if choice.group else 1
        if choice.engine == "fsdp2" and uneven_parts(columns, axes.tensor, gpus // copies // axes.tensor):
            continue
        # Ranks with the same experts shard their matrices' rows (train/model/experts.py: check).
        same = shards(axes.experts, cluster.node_size if choice.group else gpus) if choice.stage == 3 else 1
        if axes.experts > 1 and (shape.hidden % same or shape.expert_ffn % same):
            continue
        for virtual in (1, 2) if axes.stages > 1 else (1,):
            if 2 * axes.stages * virtual <= shape.layers or axes.stages == 1:
                yield replace(axes, virtual=virtual)


def jobs(workload: Workload, cluster: Cluster, choice: Choice, names: str) -> Iterator[Job]:
    """Yield the configurations of one strategy, with the kernels of that name and all activations kept."""
    node, (kernels, loss) = cluster.node_size, KERNELS[names]
    shape, attention = workload.shape, attention_of(workload.shape)
    padded = workload.pairs and attention == "eager"  # as a recipe that is not packed has them (job_of_run.py)
    comparison = replace(workload.comparison, apart=2 if padded else 1)
    for axes, micro in itertools.product(divisions(workload, cluster, choice), workload.micro_batches):
        data = axes.data(cluster.gpus)
        accumulation, rest = divmod(workload.batch, micro * data)
        # Every stage needs a micro-batch, and stages that take turns on a rank take them in rounds.
        if rest or accumulation < axes.stages or (axes.virtual > 1 and accumulation % axes.stages):
            continue
        spread: Fields = {"engine": choice.engine, "stage": choice.stage}
        if choice.group and choice.engine == "fsdp2":
            spread["shard"] = node // axes.tensor
        if choice.engine == "ddp" and axes.experts > 1 and axes.stages == 1:
            spread = EXPERTS_UNDER_DDP
        spread = spread | axis_fields(axes, cluster.gpus)
        yield Job(
            shape,
            workload.sequence,
            micro,
            accumulation,
            attended=workload.length if workload.pairs else 0,
            packed=workload.packed,
            attention=attention,
            hpz=node if choice.group and choice.engine == "zero" else 0,
            quantised=choice.quantised,
            offload=choice.offload,
            kernels=kernels,
            loss=loss,
            trained=workload.trained,
            **spread,
            **method_fields(workload.method),
            optimizer=workload.optimizer or Job.optimizer,
            comparison=comparison,
            images=workload.images,
            gpu=cluster.gpu,
            node_size=node,
            link=cluster.link,
        )


def refusal(job: Job, cluster: Cluster, usual: Gpu) -> str:
    """Return why a job is not to be taken whatever it needs of a GPU in training: it may be too small for the model while it
    loads, or the hosts' memory, or their disks.

    "" where it may be taken. usual: the kind of GPU, which says what a host has where the cluster does not
    """
    needs = host(job)
    memory = cluster.host_gib or usual.host_gib * cluster.node_size
    disk = cluster.nvme_gb or usual.nvme_gb * cluster.node_size
    most, when = max((needs.training, "train"), (needs.loading, "load"))
    if most / GIB > memory:
        return f"to {when}, each host needs {most / GIB:,.0f} GiB of memory, of {memory:,.0f} (--host_memory)"
    model = whole_on_gpu(job) / GIB
    if model > usual.memory_gib:
        which = "before FSDP2 or ZeRO-3 cut its shards"
        return f"to load, each GPU needs {model:,.1f} GiB for the model in 4 bits, of {usual.memory_gib:,.1f}, {which}"
    if needs.fullest[1] / GIB > memory:
        return f"each host may need up to {needs.fullest[1] / GIB:,.0f} GiB of memory, of {memory:,.0f} (--host_memory)"
    if needs.swapped / 1e9 > disk:
        return f"each host needs {needs.swapped / 1e9:,.0f} GB of local disk, of {disk:,.0f} (--nvme)"
    return ""


def impossible(workload: Workload, cluster: Cluster, choice: Choice) -> str:
    """Return why there is nothing to shard, replicate or divide in that way, or no formula for it; "" where there is."""
    if choice.axes and workload.images:
        return "no rank shares a vision tower with another one"
    if choice.axes and workload.method.removeprefix("rs") not in ("full", "lora"):
        return f"no formula counts axes with {workload.method}"
    for axis in choice.axes:
        if why := undivided(workload.shape, axis):
            return why
    if "tensor" in choice.axes and workload.shape.experts and "experts" not in choice.axes:
        return "plans of tensor groups leave experts to what divides them"
    if choice.offload and gpu(cluster.gpu).integrated:
        return "what leaves the GPU would lie in the same memory"
    if cluster.all and (choice.axes or choice.group):
        return "its groups need hosts with as many slots each"
    if cluster.gpus == 1 and (choice.engine == "fsdp2" or (choice.stage and not choice.offload)):
        return "it shards over several GPUs, and there is one"
    if choice.group and (cluster.node_size == 1 or cluster.nodes == 1):
        return "it needs several hosts with several GPUs each"
    return ""


def candidates(workload: Workload, cluster: Cluster) -> list[Candidate]:
    """Return each strategy's best configuration, the best strategy first.

    That is the fastest that fits, or where none fits the one that needs least.

    Where nothing fits except with offload or an axis, what fits with 8-bit moments is among them.
    """
    ranked = _with_one_optimizer(workload, cluster)
    winner = chosen(ranked)
    costly = winner is None or winner.choice.offload or winner.choice.axes
    if not workload.optimizer and workload.method == "full" and costly:
        for optimizer in LIGHTER:
            choices = tuple(c for c in workload.choices if not c.offload and runs(c, optim=optimizer))
            lighter = replace(workload, optimizer=optimizer, choices=choices)
            found = [replace(c, lighter=True) for c in _with_one_optimizer(lighter, cluster) if c.fits]
            ranked = sorted([*found, *ranked], key=_order)
            if found:
                break
    return ranked


def _order(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, candidate.seconds if candidate.fits else -candidate.estimate.spare_gib


def _estimated(workload: Workload, cluster: Cluster, choice: Choice, names: str, device: Gpu) -> Iterator[Candidate]:
    """Yield the configurations of one strategy with their estimates.

    Larger micro-batches than one that does not fit are left out, because they need more: except the largest, with which there is
    nothing to accumulate. Where all activations fit, computing layers again is left out, because it takes longer.
    """
    told = bool(cluster.nvme_gb if choice.offload == "nvme" else cluster.host_gib)
    too_large = set()
    for keeps_all in jobs(workload, cluster, choice, names):
        for job in (keeps_all, replace(keeps_all, checkpointing="full")):
            divided = (job.tensor, job.pipeline, job.virtual, job.context, job.expert, job.checkpointing)
            if divided in too_large and job.accumulation > 1:
                continue
            candidate = Candidate(
                choice, names, estimate(job, device), workload.margin, told=told, asked=workload.asked
            )
            yield candidate
            if candidate.fits:
                break
            too_large.add(divided)


def _with_one_optimizer(workload: Workload, cluster: Cluster) -> list[Candidate]:
    device, best = gpu(cluster.gpu), []
    for choice in workload.choices:
        if impossible(workload, cluster, choice):
            continue
        found = [
            candidate
            for names in workload.kernels
            if taken(workload, choice, names, device.bf16)
            for candidate in _estimated(workload, cluster, choice, names, device)
        ]
        if not found:  # no micro-batch that was asked for divides the batch
            continue
        # Hosts are looked at last: of most configurations the GPU has said already that they do not fit.
        fitting = sorted((candidate for candidate in found if candidate.fits), key=lambda c: c.seconds)
        fastest = next((c for c in fitting if not refusal(c.estimate.job, cluster, device)), None)
        if fastest:
            best.append(fastest)
        else:
            least = max(found, key=lambda c: c.estimate.spare_gib)
            best.append(replace(least, refused=refusal(least.estimate.job, cluster, device)))
    if not best and workload.choices and workload.batch % cluster.gpus:
        near = math.ceil(workload.batch / cluster.gpus) * cluster.gpus
        problem = f"{workload.batch} sequences do not divide over {cluster.gpus} GPUs"
        raise UserError("global batch", problem, f"use {near}")
    return sorted(best, key=_order)


def fastest(ranked: list[Candidate]) -> Candidate | None:
    """Return the fastest strategy that fits and that train.py runs, slow or not; None where nothing fits."""
    return next((candidate for candidate in ranked if candidate.fits and not candidate.choice.why_only), None)


def chosen(ranked: list[Candidate]) -> Candidate | None:
    """Return the simplest strategy within 5 % of the fastest of those that fit; None where nothing does.

    Offload lives on the hosts' memory and cores. Where nobody has told what they have (`host_gib`, of disks `nvme_gb`), and where
    adapters leave little to offload, it is for what fits in no other way with the usual optimizer; else it is weighed like the
    others. 8-bit moments are for what fits in no other way, or is MUCH slower. Axes of which few runs are published are taken
    where they are faster at the slow end of their interval than what else fits is expected to be.
    """
    fitting = [candidate for candidate in ranked if candidate.recommended]
    elsewhere = [candidate for candidate in fitting if candidate.weighed or not candidate.choice.offload]
    fitting = elsewhere if any(not candidate.lighter for candidate in elsewhere) else fitting
    usual = [c.seconds for c in fitting if not c.lighter and not c.choice.offload]
    fitting = [c for c in fitting if not c.lighter or not usual or MUCH * c.seconds <= min(usual)]
    proven = min((c.seconds for c in fitting if not c.choice.unproven), default=math.inf)
    fitting = [c for c in fitting if not c.choice.unproven or c.slow_seconds < proven]
    if not fitting:
        return None
    near = [candidate for candidate in fitting if candidate.seconds <= NEAR * fitting[0].seconds]
    return min(near, key=lambda c: (c.choice.rank, c.seconds))
