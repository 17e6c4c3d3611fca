"""Count the time of an optimizer step, in parts. Seconds."""

import functools
import math
from dataclasses import dataclass, replace

from ..constants import CONSTANTS
from ..hardware import Gpu, gpu
from ..hardware.network import links
from ..shape.lora import linears
from .activations import input_bytes
from .communication import between_layers, border_seconds, data_seconds, gathering_seconds, synchronising
from .comparing import Looks, looks_of_a_step
from .conventions import DRIVERS, LOGIT_BYTES
from .division import beside_matrices, division, gathered_bytes, stages
from .images import tower_job
from .job import PROJECTOR, VISION_TOWER, Job
from .layer import NORM_MOVED, layer_ops
from .mixer import Op

# Bytes per parameter of moments that do not stay on the card.
PAGED = {"paged_adamw_8bit": 2, "paged_adamw_32bit": 8, "paged_adamw": 8, "paged_lion_32bit": 4, "paged_lion_8bit": 1}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    compute: products, attention and what lies between; launches: waiting for Python where kernels are short
    inside, across: communication inside a node and between nodes that nothing hides; bubble: a pipeline's
    offload: states, weights and layers' inputs on their way to the host's memory and back, and the host's own optimizer step
    synchronising: a step's share of a round's end, where replicas meet every so many steps
    comparing: forward passes without gradients, of a reference and over mismatched answers
    images: a vision tower and its projector, forward, and backward where they are trained
    """

    compute: float
    launches: float
    inside: float
    across: float
    bubble: float
    optimizer: float
    offload: float
    synchronising: float = 0.0
    comparing: float = 0.0
    images: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def product_seconds(g: Gpu, rows: float, inner: float, outer: float, groups: float = 1) -> float:
    """Return the seconds of `groups` products (rows x inner) @ (inner x outer), all at once: the last wave is as long as any."""
    height, width = CONSTANTS.product_tile
    tiles = groups * math.ceil(rows / height) * math.ceil(outer / width)
    waves = math.ceil(tiles / g.sms) * g.sms / (groups * rows / height * outer / width)
    rate = g.product_rate * (CONSTANTS.grouped_share if groups > 1 else 1)
    return groups * 2 * rows * inner * outer * min(waves, 4.0) * (1 + CONSTANTS.tile_fill / inner) / rate


@functools.singledispatch
def op_seconds(job: Job, g: Gpu, op: Op) -> tuple[float, float]:
    """Return the seconds (forward, backward) of one operation over a micro-batch of one rank."""
    t, stream = job.tokens, g.stream_rate
    share = job.tensor if op.split else 1
    moved = (op.moved * t / share / stream, op.moved_back * t / share / stream)
    if op.kind == "pointwise":
        return moved
    if op.kind == "attention":
        if op.name == "scores":  # two products that nothing masks, one with the head's width inside
            rate, factor = g.product_rate / (1 + CONSTANTS.tile_fill / job.shape.head_dim), 2.0
        else:
            rate, factor = attention_rate(job, g), 2.5
        forward = op.flops * t / job.tensor / rate
        return forward + moved[0], factor * forward + moved[1]
    inner, outer = map(float, op.shape)
    times = op.flops / (2 * inner * outer)  # experts: how often a token goes through
    whole = bool(op.experts) and division(job).whole_experts
    if op.name in ("out", "down"):
        inner /= 1 if whole else job.tensor
    else:
        outer /= 1 if whole else job.tensor
    rows, groups = t * times, 1.0
    if op.experts:
        groups = op.experts / job.expert
        rows = t * times / groups / (job.tensor if whole else 1)
    forward = product_seconds(g, rows, inner, outer, groups)
    back = product_seconds(g, rows, outer, inner, groups)
    if job.method == "full":
        back += product_seconds(g, inner, rows, outer, groups)
    return forward, back


def attention_rate(job: Job, g: Gpu) -> float:
    """Return FLOPs per second of fused attention, for its length and the width of its heads; only the visible scores count."""
    kernel, times = ("flash2", CONSTANTS.efficient_attention) if job.by_masks else (job.attention, 1)
    half, tokens = CONSTANTS.flash_half_length.get(kernel, 0), max(8192.0, job.length)
    beside, width = CONSTANTS.exponential_width.get(kernel, 0), min(128, job.shape.head_dim)
    wide = (1 + beside / 128) / (1 + beside / width)
    return g.attention_rate(kernel) / times * wide * (1 + half / 8192) / (1 + half / tokens)


def driven(job: Job, g: Gpu) -> Gpu:
    """Return the GPU with what its products sustain for whoever drives it."""
    return replace(g, sustained=g.sustained * DRIVERS[job.driver])


def layer_seconds(job: Job, g: Gpu, moe: bool) -> tuple[float, float, float]:
    """Return the seconds of a layer and micro-batch (forward, backward with recomputation), and the share that is recomputed."""
    s, stream = job.shape, g.stream_rate
    both = []
    for op in layer_ops(job, moe):
        forward, backward = op_seconds(job, g, op)
        both.append((op, op.share * forward, op.share * backward))
    forward, backward = sum(one for _, one, _ in both), sum(one for _, _, one in both)
    if job.dora:
        weights = sum(one.share * one.inner * one.outer for one in linears(s, job.targets, moe=moe))
        forward += NORM_MOVED[job.adapter_copies] * weights / job.tensor / stream
    scores = sum(one for op, one, _ in both if op.kind == "attention")
    half = (forward - scores) / 2
    parts = {"none": 0.0, "attention": scores, "half": half, "selective": half, "full": forward / job.every}
    again = parts[job.checkpointing] + sum(one for op, one, _ in both if op.tiled)
    if job.method == "qlora":
        once = CONSTANTS.dequantise_bytes * (s.moe_layer if moe else s.dense_layer) / job.tensor / stream
        forward, backward = forward + once, backward + once * (1 + again / forward)
    return forward, backward + again, again / forward


def step_time(job: Job, device: Gpu | None = None) -> StepTime:
    """Return the time of an optimizer step of `job`, on `device` or the catalogue's GPU of that kind."""
    g, s = driven(job, device or gpu(job.gpu)), job.shape
    net, m, p = links(g, job.link, job.node_size), job.accumulation, job.pipeline
    stream = g.stream_rate
    forward = backward = again = 0.0
    for moe, count in s.kinds:
        one = [part * count / s.layers for part in layer_seconds(job, g, moe)]
        forward, backward, again = forward + one[0], backward + one[1], again + one[2]
    product, moved = head_seconds(job, g)
    head = 3 * product + moved
    if job.loss == "tiled":  # the product once more
        head *= 4 / 3
    parts = stages(job)
    most = max(parts, key=lambda stage: stage.trained)
    trained = most.trained
    add = job.conventions.accumulated * trained / stream if m > 1 else 0.0
    around = between_layers(job, net, again > 0)
    strides = ((job.tensor, 1), (job.context, job.tensor), (job.expert, division(job).expert_stride))
    around_across = any(net.crosses(*group) for group in strides)
    waiting = waiting_seconds(job, again, forward + backward + around)
    per_micro = [n * (forward + backward + waiting + around) + add for n in (stage.layers for stage in parts)]
    per_micro[-1] += head
    slowest = per_micro.index(max(per_micro))
    n, psi = parts[slowest].layers, parts[slowest].parameters
    compute = m * (n * (forward + backward) + add + head * (slowest == p - 1))
    sends = border_seconds(job, net)
    bubble = job.order.bubble * (p - 1) * per_micro[slowest] / job.virtual
    shared = data_seconds(job, net, n * (forward + waiting / 3), n * (backward + waiting * 2 / 3), most)
    across = net.crosses(job.data * job.context, job.tensor)
    stepped = trained / (job.shard_ranks if job.stage >= 1 else 1)
    optimizer = 0.0 if job.offload else CONSTANTS.adam_bytes * stepped / stream
    if job.optimizer == "muon" and not job.offload:
        matrices = (1 - beside_matrices(job)) * trained / s.hidden**2
        optimizer += CONSTANTS.muon_products * product_seconds(g, s.hidden, s.hidden, s.hidden) * matrices / job.gpus
    if job.optimizer.startswith("paged"):  # moments come from the host's memory and go back
        optimizer += 2 * PAGED[job.optimizer] * stepped / (g.pcie_gb_s * 1e9)
    tensor = m * n * around
    inside = (0.0 if around_across else tensor) + (0.0 if across else shared)
    outside = (tensor if around_across else 0.0) + sends + (shared if across else 0.0)
    offload = _offload(job, g, stepped, psi, compute) + _inputs_moving(job, g, n)
    whole = (compute, m * n * waiting, inside, outside, bubble, optimizer, offload)
    found = StepTime(*(part / g.efficiency for part in whole))
    beside = {"comparing": looking_seconds(looks_of_a_step(job), g), "images": image_seconds(job, g)}
    return replace(found, synchronising=synchronising(job, g, found.total), **beside)


def head_seconds(job: Job, g: Gpu) -> tuple[float, float]:
    """Return the seconds per micro-batch of (the head's product, forward; moving logits through memory, both ways)."""
    s, t, parts = job.shape, job.tokens, division(job)
    if s.scores:  # one number of an answer's last token
        return 0.0, 0.0
    product = product_seconds(g, max(1.0, t * job.labelled), s.hidden, s.vocab / parts.ends[1])
    logits = s.vocab / parts.logits
    return product, 2 * max(LOGIT_BYTES[job.loss], 4) * t * job.labelled * logits / g.stream_rate


# ---- forward passes without gradients --------------------------------------------------------------------------------
def looking_seconds(looks: Looks, g: Gpu) -> float:
    """Return the seconds of looking at answers without gradients, for as many tokens as a step has."""
    return sum(times * forward_seconds(model, g) for model, times in looks) / g.efficiency


def forward_seconds(job: Job, g: Gpu) -> float:
    """Return the seconds of a forward pass over all micro-batches of a step. The stages of a pipeline compute one after another
    (train/engines/parallel/pipeline.py: forward_alone)."""
    plain, s, m = replace(job, checkpointing="none"), job.shape, job.accumulation
    net = links(g, job.link, job.node_size)
    computes = sum(layer_seconds(plain, g, moe)[0] * count / s.layers for moe, count in s.kinds)
    around = between_layers(plain, net, False) / 2
    # Of the time in which Python launches a layer, a third is for the forward pass.
    waits = waiting_seconds(plain, 0.0, 3 * (computes + around)) / 3
    product, moved = head_seconds(job, g)
    busy = s.layers * (computes + around + waits) + product + moved / 2
    stage = max(stages(job), key=lambda stage: stage.parameters)
    busy += gathering_seconds(job, net, s.layers * (computes + waits), stage)
    if job.offload in ("all", "nvme"):
        busy = max(busy, _fetching(job, g, stage.parameters))
    return m * busy + border_seconds(job, net) / 2


# ---- images ----------------------------------------------------------------------------------------------------------
def image_seconds(job: Job, g: Gpu) -> float:
    """Return the seconds that the images of a step take in tower and projector, over all micro-batches of a rank.

    A frozen tower computes forward only. What ranks gather and reduce of it data_seconds() has.
    """
    if not job.images:
        return 0.0
    tower, images, m = tower_job(job), job.images, job.accumulation
    trains = VISION_TOWER in images.trained
    forward, backward, again = layer_seconds(tower, g, moe=False)
    if trains:
        each = forward + backward + waiting_seconds(tower, again, forward + backward)
    else:  # a third of the time in which Python launches a layer is for the forward pass
        each = forward + waiting_seconds(tower, 0.0, 3 * forward) / 3
    seconds = m * tower.shape.layers * each
    products = [(images.each.patches, images.tower.pixels, tower.shape.hidden, trains)]
    projects = trains or PROJECTOR in images.trained
    products += [(images.each.projected, *widths, projects) for widths in images.tower.products]
    count = job.micro_batch * images.per_sample
    for rows, inner, outer, backward_too in products:
        seconds += m * product_seconds(g, max(1.0, count * rows), inner, outer) * (3 if backward_too else 1)
    return seconds / g.efficiency


@functools.singledispatch
def waiting_seconds(job: Job, again: float, busy: float) -> float:
    """Return the seconds per layer and micro-batch that a GPU which computes for `busy` waits for Python to launch kernels."""
    engine = job.conventions
    adapters = 1 if job.method == "full" else CONSTANTS.adapter_launching
    launching = CONSTANTS.launch_seconds * (1 + again / 2) * adapters
    if job.stage >= 3:
        launching = launching * engine.host_sharded + engine.host_rank * job.shard_ranks
    if job.stage < 3 or math.isinf(engine.host_norm):
        return max(0.0, launching - busy)
    return (busy**engine.host_norm + launching**engine.host_norm) ** (1 / engine.host_norm) - busy


def cpu_adam_seconds(job: Job, g: Gpu) -> float:
    """Return the seconds of the host's own optimizer step where states are offloaded, over all of a node's shards."""
    trained = job.trained or job.shape.parameters
    rate = CONSTANTS.cpu_adam_rate * min(g.pcie_gb_s, CONSTANTS.pcie_5)
    return trained / job.shard_ranks * min(job.node_size, job.gpus) / rate if job.offload else 0.0


def _offload(job: Job, g: Gpu, stepped: float, psi: float, compute: float) -> float:
    """Return the seconds that offloading adds to a step: gradients go down, the host steps, weights come up for each pass.

    FSDP2 has gradients reduced, and so sent down, in each micro-batch (train/engines/fsdp2_engine.py: sync_each_batch).
    """
    if not job.offload:
        return 0.0
    pcie, here = g.pcie_gb_s * 1e9, min(job.node_size, job.gpus)
    times = 1 if job.deepspeed else job.accumulation
    seconds = 4 * stepped * times / pcie + cpu_adam_seconds(job, g)
    if job.offload in ("all", "nvme"):
        seconds += max(0.0, 2 * job.accumulation * _fetching(job, g, psi) - compute)
    if job.offload == "nvme":
        seconds += 2 * 12 * stepped * here / CONSTANTS.nvme_rate
    return seconds


def _inputs_moving(job: Job, g: Gpu, layers: float) -> float:
    """Return the seconds in which what layers begin with goes to the host and comes back: on the stream that computes."""
    if not job.inputs_on_host:
        return 0.0
    return 2 * job.accumulation * layers / job.every * input_bytes(job) / (g.pcie_gb_s * 1e9)


def _fetching(job: Job, g: Gpu, psi: float) -> float:
    """Return the seconds in which offloaded weights come up once."""
    rate = g.pcie_gb_s * 1e9 if job.offload == "all" else CONSTANTS.nvme_rate / min(job.node_size, job.gpus)
    return gathered_bytes(job, psi) / job.shard_ranks / rate
