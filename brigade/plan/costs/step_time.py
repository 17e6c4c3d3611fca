"""Time of an optimizer step, in parts, by formula. Seconds."""

import math
from dataclasses import dataclass, replace

from ..hardware import Gpu, gpu
from ..hardware.network import CALL_LATENCY, Links, links
from ..shape.lora import linears
from .adapters import NORM_MOVED
from .averaging import synchronising
from .conventions import LOGIT_BYTES
from .job import Job
from .layer import Op, exchanged_width, layer_ops
from .stages import Stage, experts_whole, gathered_bytes, logits_divisor, same_experts, stages, vocabulary_divisors

TILE = (128, 256)  # of a product's result that a multiprocessor computes at a time, in cuBLAS' kernels for large shapes
FILL = 300  # inner width that a tile's start and end cost
# Times as fast as bf16, of dense products by how they are scaled, and of those of many experts: read off published rows.
FP8 = {"": 1.0, "row": 1.15, "torch": 1.5, "tensor": 2.6, "mx": 3.2}
FP8_GROUPED = 2.2
# Of the time of communication behind computing: NCCL's kernels take 16 to 32 of a card's multiprocessors.
CONTENTION = 0.2
STEP_BYTES = 30  # that Adam reads and writes per parameter: weight, gradient, two moments in fp32, and the bf16 weight
GROUPED = 0.65  # of a dense product's rate that those of many experts at once reach: 29 published rows in bf16
ADAPTED = 1.7  # times as long to launch with LoRA, 244 kernels for 115: 4.7 ms a layer (collected.csv, qwen-007)
DEQUANTISE = 4.5  # bytes per 4-bit weight and pass: half a byte read, bf16 written and read again
# Parameters per second and node, for each GB/s of its PCIe: its memory is as new. 1.75e9 with PCIe 4 (DeepSpeed's ZenFlow blog:
# about 4 s for 7B), 4.0e9 with PCIe 5 (collected.csv, ml-engineering: 2 s for 8B).
CPU_ADAM = 7.3e7
PCIE_5 = 55  # GB/s; Grace's link to its GPU says nothing of its memory
# What FlashAttention's kernels for Hopper and Blackwell reach grows with the length: half of its most at so many tokens.
# hardware.yaml has it at 8,192 (collected.csv, ml-engineering: up to 262,144 tokens).
HALF_LENGTH = {"flash3": 2300, "flash4": 4100}
PAGED = {"paged_adamw_8bit": 2, "paged_adamw": 8}  # bytes per parameter of moments that do not stay on the card
NVME = 6e9  # bytes per second and node of local disks


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    compute: products, attention and what lies between; launches: waiting for Python where kernels are short
    inside, across: communication inside a node and between nodes that nothing hides; bubble: a pipeline's
    offload: states and weights on their way to the host's memory and back, and the host's own optimizer step
    synchronising: a step's share of a round's end, where replicas meet every so many steps
    """

    compute: float
    launches: float
    inside: float
    across: float
    bubble: float
    optimizer: float
    offload: float
    synchronising: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def product_seconds(g: Gpu, rows: float, inner: float, outer: float, fp8: str = "", groups: float = 1) -> float:
    """Of `groups` products (rows x inner) @ (inner x outer): tiles are computed whole, and the last wave as long as any."""
    tiles = groups * math.ceil(rows / TILE[0]) * math.ceil(outer / TILE[1])
    waves = math.ceil(tiles / g.sms) * g.sms / (groups * rows / TILE[0] * outer / TILE[1])
    rate = g.product_rate * (GROUPED * (FP8_GROUPED if fp8 else 1) if groups > 1 else FP8[fp8])
    compute = groups * 2 * rows * inner * outer * min(waves, 4.0) * (1 + FILL / inner) / rate
    memory = groups * 2 * (rows * inner + inner * outer + rows * outer) / g.stream_rate
    return max(compute, memory)


def op_seconds(job: Job, g: Gpu, op: Op) -> tuple[float, float]:
    """(forward, backward) of one operation over a micro-batch of one rank."""
    t, stream = job.tokens, g.stream_rate
    share = job.tensor if op.split or job.sequence_parallel else 1
    moved = (op.moved * t / share / stream, op.moved_back * t / share / stream)
    if op.kind == "pointwise":
        return moved
    if op.kind == "attention":
        if op.name == "scores":  # two products that nothing masks, one with the head's width inside
            rate, factor = g.product_rate / (1 + FILL / job.shape.head_dim), 2.0
        else:
            rate, factor = g.attention_rate(job.attention) * _longer(job), 2.5
        forward = op.flops * t / job.tensor / rate
        return forward + moved[0], factor * forward + moved[1]
    inner, outer = map(float, op.shape)
    times = op.flops / (2 * inner * outer)  # experts: how often a token goes through
    whole = bool(op.experts) and experts_whole(job)
    if op.name in ("out", "down"):
        inner /= 1 if whole else job.tensor
    else:
        outer /= 1 if whole else job.tensor
    rows, groups = t * times, 1.0
    if op.experts:
        groups = op.experts / job.expert
        rows = t * times / groups / (job.tensor if whole else 1)
    forward = product_seconds(g, rows, inner, outer, job.fp8, groups)
    back = product_seconds(g, rows, outer, inner, job.fp8, groups)
    if job.method == "full":
        back += product_seconds(g, inner, rows, outer, job.fp8, groups)
    return forward, back


def _longer(job: Job) -> float:
    """Times as fast as at 8,192 tokens."""
    half, tokens = HALF_LENGTH.get(job.attention, 0), max(8192.0, job.length)
    return (1 + half / 8192) / (1 + half / tokens)


def layer_seconds(job: Job, g: Gpu, moe: bool) -> tuple[float, float, float]:
    """(forward, backward with what is computed again, share of the forward pass that is) of a layer and micro-batch."""
    s, stream = job.shape, g.stream_rate
    both = [(op, *op_seconds(job, g, op)) for op in layer_ops(job, moe)]
    forward, backward = sum(one for _, one, _ in both), sum(one for _, _, one in both)
    if job.dora:
        weights = sum(inner * outer for _, inner, outer in linears(s, job.targets, moe=moe))
        forward += NORM_MOVED[job.adapter_copies] * weights / job.tensor / stream
    scores = sum(one for op, one, _ in both if op.kind == "attention")
    parts = {"none": 0.0, "attention": scores, "half": (forward - scores) / 2, "full": forward / job.every}
    again = parts[job.checkpointing] + sum(one for op, one, _ in both if op.tiled)
    if job.method == "qlora":
        once = DEQUANTISE * (s.moe_layer if moe else s.dense_layer) / job.tensor / stream
        forward, backward = forward + once, backward + once * (1 + again / forward)
    return forward, backward + again, again / forward


def step_time(job: Job, device: Gpu | None = None) -> StepTime:
    """An optimizer step of `job`, on `device` or the catalogue's GPU of that kind."""
    g, s = device or gpu(job.gpu), job.shape
    net, t, m, p = links(g, job.link, job.node_size), job.tokens, job.accumulation, job.pipeline
    stream = g.stream_rate
    forward = backward = again = 0.0
    for moe, count in s.kinds:
        one = [part * count / s.layers for part in layer_seconds(job, g, moe)]
        forward, backward, again = forward + one[0], backward + one[1], again + one[2]
    head = 3 * product_seconds(g, max(1.0, t * job.labelled), s.hidden, s.vocab / vocabulary_divisors(job)[1])
    logits = s.vocab / logits_divisor(job)
    head += 2 * max(LOGIT_BYTES[job.loss], 4) * t * job.labelled * logits / stream
    if job.loss == "tiled":  # the product once more
        head *= 4 / 3
    parts = stages(job)
    most = max(parts, key=lambda stage: stage.trained)
    trained = most.trained
    add = job.conventions.accumulated * trained / stream if m > 1 else 0.0
    around, around_across = _tensor(job, net)
    if job.context > 1:
        around += _ulysses(job, net, again > 0) if job.ours else _ring(job, net, g, again > 0)
        around_across = around_across or net.crosses(job.context, job.tensor)
    if job.expert > 1:
        around += _experts(job, net, again > 0)
        around_across = around_across or net.crosses(job.expert, 1 if job.ours else job.tensor)
    waiting = _waiting(job, again, forward + backward + around)
    per_micro = [n * (forward + backward + waiting + around) + add for n in (stage.layers for stage in parts)]
    per_micro[-1] += head
    slowest = per_micro.index(max(per_micro))
    n, psi = parts[slowest].layers, parts[slowest].parameters
    compute = m * (n * (forward + backward) + add + head * (slowest == p - 1))
    sends = _borders(job, net)
    bubble = job.order.bubble * (p - 1) * per_micro[slowest] / job.virtual
    shared = _data(job, net, n * (forward + waiting / 3), n * (backward + waiting * 2 / 3), most)
    across = net.crosses(job.data * job.context, job.tensor)
    stepped = trained / (job.shard_ranks if job.stage >= 1 else 1)
    optimizer = 0.0 if job.offload else STEP_BYTES * stepped / stream
    if job.optimizer.startswith("paged"):  # moments come from the host's memory and go back
        optimizer += 2 * PAGED[job.optimizer] * stepped / (g.pcie_gb_s * 1e9)
    tensor = m * n * around
    inside = (0.0 if around_across else tensor) + (0.0 if across else shared)
    outside = (tensor if around_across else 0.0) + sends + (shared if across else 0.0)
    offload = _offload(job, g, stepped, psi, compute)
    whole = (compute, m * n * waiting, inside, outside, bubble, optimizer, offload)
    found = StepTime(*(part / g.efficiency for part in whole))
    return replace(found, synchronising=synchronising(job, g, found.total))


def _waiting(job: Job, again: float, busy: float) -> float:
    """Seconds per layer and micro-batch for which a GPU that is busy for `busy` waits for Python to launch what comes next."""
    engine = job.conventions
    launching = engine.host_seconds * (1 + again / 2) * (1 if job.method == "full" else ADAPTED)
    if job.stage >= 3:
        launching = launching * engine.host_sharded + engine.host_rank * job.shard_ranks
    if job.stage < 3 or math.isinf(engine.host_norm):
        return max(0.0, launching - busy)
    return (busy**engine.host_norm + launching**engine.host_norm) ** (1 / engine.host_norm) - busy


def _tensor(job: Job, net: Links) -> tuple[float, bool]:
    """Seconds per layer and micro-batch of tensor parallelism, and whether it crosses nodes.

    Gather before and scatter after attention and MLP, and the same backward: eight halves; computing whole layers again adds
    four, and gathering again for the weights' gradients two.
    """
    if job.tensor == 1:
        return 0.0, False
    halves = 8 + 4 * (job.checkpointing == "full") + 2 * (job.sequence_parallel and not job.conventions.keep_gathered)
    one = net.half(2 * job.shape.hidden * job.tokens, job.tensor)
    return halves * one * (1 - job.conventions.tensor_hidden), net.crosses(job.tensor)


def _experts(job: Job, net: Links, again: bool) -> float:
    """Seconds per layer and micro-batch of sending each token to its experts and back, and the same backward.

    Published engines send a token once to a node on which it has several experts (DeepEP), train.py to each of them, and once
    more where layers are computed again; its groups are of neighbours, and each rank of a tensor group sends its part of their
    tokens, which they then gather.
    """
    tokens, share = 2 * job.shape.hidden * job.tokens, job.shape.moe_layers / job.shape.layers
    if not job.ours:
        return 4 * net.half(tokens * job.shape.top_k, job.expert, job.tensor) * share
    one = 2 * net.exchange(tokens * job.shape.top_k / job.tensor, job.expert) + net.half(tokens, job.tensor)
    return (2 + again) * one * share


def _borders(job: Job, net: Links) -> float:
    """Seconds per step of activations and gradients that cross a stage's border. Megatron's tensor ranks send a part each and
    gather (Narayanan et al. 2021, section 4.1), train.py's send all."""
    if job.pipeline == 1:
        return 0.0
    one = (4 if job.autocast else 2) * job.shape.hidden * job.tokens / (1 if job.ours else job.tensor)
    return 2 * net.send(one, job.tensor * job.context * job.data, job.pipeline) * job.accumulation * job.virtual


def _ulysses(job: Job, net: Links, again: bool) -> float:
    """Seconds per layer and micro-batch of exchanging heads: queries, keys and values before attention and its output after
    it, the same backward, and once more when that is computed again (Jacobs et al. 2023, arXiv 2309.14509, section 3.2)."""
    one = net.exchange(2 * exchanged_width(job) * job.tokens / job.tensor, job.context, job.tensor)
    return (2 + again) * (one + CALL_LATENCY)  # two calls each way


def _ring(job: Job, net: Links, g: Gpu, again: bool) -> float:
    """Seconds per layer and micro-batch of context parallelism that attention does not hide.

    Keys and values go round the ring, forward (and when that is computed again) and backward, there with their gradients (ring
    attention, arXiv 2310.01889; torch/distributed/tensor/experimental/_context_parallel).
    """
    s = job.shape
    around = net.half(2 * s.key_value_width * job.tokens * job.context / job.tensor, job.context, job.tensor)
    forward = 4 * s.query_width * job.scored / 2 * job.tokens / job.tensor / g.attention_rate(job.attention)
    return (1 + again) * max(0.0, around - forward) + max(0.0, 2 * around - 2.5 * forward)


def _data(job: Job, net: Links, forward: float, backward: float, stage: Stage) -> float:
    """Seconds per step of data-parallel communication that computing does not hide. Ranks with the same experts have groups of
    their own."""
    engine, ranks, m = job.conventions, job.data * job.context, job.accumulation
    n, layers, full = job.shard_ranks, job.shape.layers / job.pipeline, job.method == "full"
    gathered = gathered_bytes(job, stage.parameters) / max(stage.parameters, 1)
    # (parameters, those trained, ranks that shard them, ranks that hold them, from one to the next)
    dense = stage.parameters - stage.experts
    parts = [(dense, stage.trained - stage.experts * full, n, ranks, job.tensor)]
    if stage.experts:
        stride = job.expert * (1 if job.ours else job.tensor)
        parts.append((stage.experts, stage.experts * full, *same_experts(job), stride))
    if job.stage >= 3:
        # ZeRO++ (arXiv 2306.10209, table 1): half of the weights' bytes and a quarter of the gradients'.
        gather = scatter = across = 0.0
        for psi, trained, sharing, holding, stride in parts:
            weights, reduced = gathered * psi / layers, engine.reduced / (4 if job.quantised else 1)
            calls = layers * engine.collectives
            one = calls * net.half(weights / engine.collectives / (2 if job.quantised else 1), sharing, stride)
            if job.hpz:  # the first gather of a step fills the node's own copy, from which the others come
                one = (one + (2 * m - 1) * calls * net.half(weights / engine.collectives, job.hpz, stride)) / (2 * m)
            gather += one
            if engine.collectives > 1:  # a bucket of hidden^2 elements each: with adapters far fewer
                calls = min(calls, max(1.0, trained / job.shape.hidden**2))
            scatter += calls * net.half(reduced * trained / calls, sharing, stride)
            kept = engine.reduced * trained / sharing / layers
            across += layers * net.all_reduce(kept, holding // sharing, stride * sharing)
        gathers, scatters = gather * engine.gathers_hidden, scatter * engine.scatters_hidden  # behind computing
        exposed = m * (max(0.0, gathers - forward) + max(0.0, gathers + scatters - backward)) + 2 * gathers / layers
        exposed += m * (2 * (gather - gathers) + scatter - scatters)
        exposed += max(0.0, across - max(0.0, backward - gathers - scatters))
        return exposed + CONTENTION * m * min(2 * gathers + scatters + across / m, forward + backward)
    reduce = gather = 0.0
    for _, trained, _, holding, stride in parts:
        calls = max(1.0, engine.reduced * trained / engine.bucket) if engine.bucket else layers
        payload = engine.reduced * trained / calls
        whole = job.stage == 0 or engine.everywhere
        reduce += calls * (net.all_reduce if whole else net.half)(payload, holding, stride)
        if job.stage:
            tensors = 9 * layers if engine.per_tensor else calls
            gather += tensors * net.half(engine.gathered * trained / tensors, holding, stride)
    if job.stage == 2:
        reduce *= m
    hidden = min(reduce, engine.hidden * backward * (m if job.stage == 2 else 1))
    return reduce - hidden + gather


def cpu_adam_seconds(job: Job, g: Gpu) -> float:
    """Seconds per step of the host's own optimizer step where states are offloaded: all of a node's shards."""
    trained = job.trained or job.shape.parameters
    rate = CPU_ADAM * min(g.pcie_gb_s, PCIE_5)
    return trained / job.shard_ranks * min(job.node_size, job.gpus) / rate if job.offload else 0.0


def _offload(job: Job, g: Gpu, stepped: float, psi: float, compute: float) -> float:
    """Seconds per step that offloading adds: gradients down and weights up, the host's Adam, and weights up for every pass."""
    if not job.offload:
        return 0.0
    pcie, here = g.pcie_gb_s * 1e9, min(job.node_size, job.gpus)
    seconds = 4 * stepped / pcie + cpu_adam_seconds(job, g)
    if job.offload in ("all", "nvme"):
        shard = gathered_bytes(job, psi) / job.shard_ranks
        rate = pcie if job.offload == "all" else NVME / here
        seconds += max(0.0, 2 * job.accumulation * shard / rate - compute)
    if job.offload == "nvme":
        seconds += 2 * 12 * stepped * here / NVME
    return seconds
