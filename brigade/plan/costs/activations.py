"""Count what layers, logits and a vision tower keep for the backward pass, and need in it. Bytes."""

import functools
import math

from ..constants import CONSTANTS
from ..shape.lora import ALL, all_linears
from .conventions import LOGIT_BYTES
from .division import division, stages
from .images import tower_job
from .job import PROJECTOR, VISION_TOWER, Job
from .layer import NORM_STANDS, adapter_bytes, layer_ops

PIXEL = 4  # bytes of a number that a processor gives, as it lies in a micro-batch
TILE = 2**26  # logits that stand at once where the loss is computed in tiles (train/loss/tiled.py)


def micro_batches_in_flight(job: Job, place: int) -> float:
    """Return how many micro-batches the stage at `place` keeps activations of, under 1F1B.

    Interleaved, a stage holds chunks of its layers, of each micro-batch one after the other: 2 (p - 1) + (v - 1) p + 1 of them on
    the first (Megatron-LM's warm-up; Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / p v).
    """
    p, v = job.pipeline, job.virtual
    if job.order.keeps_all:
        return job.accumulation
    if v == 1:
        return min(p - place, job.accumulation)
    return min(2 * (p - 1 - place) + (v - 1) * p + 1, v * job.accumulation) / v


def layer_bytes(job: Job, moe: bool) -> tuple[float, float]:
    """Return the bytes per token (that one rank keeps of a layer, that the layer's backward pass needs at its peak beyond them).

    What an operation kept is free when its gradients are there, so that a need late in the pass finds room.
    """
    kept = freed = peak = inside = 0.0
    tile = min(1.0, job.shape.hidden / job.tokens)  # share of the tokens that a tile has (train/loss/tiled.py)
    pairs = [(op, job.tensor if op.split else 1) for op in layer_ops(job, moe)]
    for op, parts in pairs:
        if op.tiled:
            inside += op.kept * op.share / parts
        elif not (job.checkpointing == "attention" and op.name == "scores"):  # which are computed again
            kept += op.kept * op.share / parts
    for op, parts in reversed(pairs):
        needs = tile * (inside + op.back / parts) if op.tiled else op.back / parts
        peak = max(peak, needs - freed)
        freed += 0.0 if op.tiled else op.kept * op.share / parts
    return kept, peak


@functools.singledispatch
def activation_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes per micro-batch (that one layer keeps, mean over layers; that a layer's backward pass needs besides).

    With checkpointing a layer keeps what it begins with, and what it computes again is added to what it needs.
    """
    s, t = job.shape, job.tokens
    whole = back = largest = 0.0
    for moe, count in s.kinds:
        kept, needed = layer_bytes(job, moe)
        whole += kept * t * count / s.layers
        back, largest = max(back, needed * t), max(largest, kept * t)
    whole += adapters_keep(job)
    largest += adapters_keep(job)
    if s.sizes:
        largest = max(layer_bytes(one, s.moe_layers > 0)[0] * t + adapters_keep(one) for one, _ in job.alike)
    # Each layer's part of a second embedding is made before the layers: its norm's input, normalised, and the result.
    before = (10 if job.method == "full" else 6) * s.per_layer_input * t
    boundary = input_bytes(job)
    if job.checkpointing == "full":
        kept = (0.0 if job.inputs_on_host else boundary) / job.every + whole * (1 - 1 / job.every)
        # What the first norm keeps is what the layer begins with, or an fp32 copy of it. From the host it comes back.
        shared = boundary if job.one_kernel_norm or job.autocast else 0.0
        return kept + before, largest - shared + boundary * job.inputs_on_host + back
    if job.checkpointing == "selective":
        kept = boundary + selectively_kept(job) * t / job.tensor
        return kept + before, max(0.0, largest - kept) + back
    return whole + before, back


def input_bytes(job: Job) -> float:
    """Return the bytes that a layer begins with, per micro-batch."""
    return (4 if job.autocast else 2) * job.shape.hidden * job.tokens


def inputs_on_host(job: Job) -> float:
    """Return the bytes of host memory in which a rank's layers have what they begin with, until they are computed again.

    torch rounds each page-locked block up to a power of two (c10, CachingHostAllocator.h).
    """
    if not job.inputs_on_host:
        return 0.0
    each = 2 ** math.ceil(math.log2(input_bytes(job)))
    return max(each * stage.layers * micro_batches_in_flight(job, stage.place) for stage in stages(job))


def selectively_kept(job: Job) -> float:
    """Return the bytes per token that a layer keeps besides what it begins with: every second product's output, the first among
    them, and what attention gives (train/engines/recomputing.py: kept_contexts)."""
    s = job.shape
    into = [s.query_width + s.key_value_width] if s.family.fused_qkv else [s.query_width, *[s.key_value_width / 2] * 2]
    up = [s.ffn] * 2 if s.family.gated and not s.family.fused_gate else [s.ffn * (1 + s.family.gated)]
    kept = [*into, s.hidden, *up, s.hidden][::2]
    return 2 * sum(kept) + 2 * s.query_width + 4 * s.heads


def adapters_keep(job: Job) -> float:
    """Return the bytes that adapters and frozen weights add to a layer, mean over layers; layer_ops() does not have them."""
    if job.method == "full":
        return 0.0
    more = sum(count * adapter_bytes(job, moe) for moe, count in job.shape.kinds)
    return more * job.tokens / job.shape.layers / job.tensor


def whole_weight_bytes(job: Job) -> float:
    """Return the bytes that a layer's largest weight takes on the way back: four bits are dequantised there (bitsandbytes:
    autograd/_functions.py), and DoRA takes the norm of its rows."""

    def largest(targets: str) -> float:
        return max((inner * outer for count, inner, outer in all_linears(job.shape, targets) if count), default=0)

    dequantised = 2 * largest(ALL) if job.method == "qlora" else 0.0
    normed = NORM_STANDS[job.adapter_copies] * largest(job.targets) if job.dora else 0.0
    return (dequantised + normed) / job.tensor


@functools.singledispatch
def logit_bytes(job: Job) -> float:
    """Return the bytes of final norm, logits and loss at their peak, per micro-batch."""
    s, t, loss = job.shape, job.tokens, job.loss
    norm = 2 if job.one_kernel_norm else 6  # bytes of its input, as in a layer
    if s.scores:  # of an answer's last token, one number
        return (norm + 2) * s.hidden * t
    capped = 2 * s.family.capped  # bytes of a logit that tanh keeps
    if loss == "fused":  # besides what the norm gives
        return (CONSTANTS.fused_loss_bytes * job.labelled + (norm + 2) * s.hidden) * t
    final_norm = norm * s.hidden * t
    if loss == "tiled":  # the norm's result with its gradient and a tile's logits, or what the norm's way back needs
        tile = 4 * s.hidden * t + (LOGIT_BYTES["full"] + capped) * min(TILE, t * job.labelled * s.vocab)
        return final_norm + max(tile, 0.0 if job.one_kernel_norm else final_norm * CONSTANTS.norm_back / norm)
    divisor = division(job).logits
    if divisor > 1:
        loss = "parallel"
        final_norm += 2 * s.hidden * t  # gathered for the head
    return final_norm + (LOGIT_BYTES[loss] + capped) * t * job.labelled * s.vocab / divisor


def tower_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes per micro-batch that images add (from forward to backward pass, at the peak of the tower's own pass).

    A frozen tower keeps its output only, for a projector that is trained; its layers come and go. The pixels stay in any case.
    """
    images = job.images
    if not images:
        return 0.0, 0.0
    pixels = PIXEL * images.tower.pixels * job.micro_batch * images.per_sample * images.each.patches
    # What the projector's linear layers read and give. Where it is frozen it stands at once only while the projector computes.
    numbers = sum(inner + outer for inner, outer in images.tower.products)
    projected = (4 if job.autocast else 2) * numbers * job.micro_batch * images.per_sample * images.each.projected
    one_layer, back = tower_layer_bytes(job)
    if VISION_TOWER in images.trained:
        kept = pixels + projected + one_layer * images.tower.shape.layers
        return kept, kept + back
    kept = pixels + projected * (PROJECTOR in images.trained)
    return kept, pixels + max(one_layer, projected)


def tower_layer_bytes(job: Job) -> tuple[float, float]:
    """Return activation_bytes() of the vision tower, with what a layer keeps to train the vectors that scale its outputs."""
    assert job.images
    tower = tower_job(job)
    kept, back = activation_bytes(tower)
    more = 2 * job.images.tower.scales * tower.shape.hidden * tower.tokens * (tower.method == "full")
    return (kept, back + more) if tower.checkpointing == "full" else (kept + more, back)
