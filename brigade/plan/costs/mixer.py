"""List the operations of a hybrid's mixer, which stands in the place of attention or beside it: as layer.py does for a layer.

Counted is what Transformers' modules compute with the kernels of flash-linear-attention, mamba-ssm and causal-conv1d. Without
these Transformers computes in torch, in fp32 and by tensors of whole chunks, which takes several times the memory and time. No
GPU has measured either here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..constants import CONSTANTS
from ..shape.model_shape import CHANNELS, CONVOLUTION, RULE, SCAN, SPACE, Mixer
from .job import Job

Kind = Literal["product", "attention", "pointwise"]


@dataclass(frozen=True)
class Op:
    """One operation, per token.

    flops: forward; a product costs twice as much backward, attention 2.5 times (it computes the scores again)
    shape: of a product, (inner, outer) width of its weight
    moved, moved_back: bytes read and written, forward and backward
    kept: bytes for the backward pass
    back: bytes that its own backward pass needs besides, at its peak
    split: whether tensor parallelism divides it
    experts: how many weights of that shape the tokens are spread over
    share: of the layers that have it, in a mean layer
    tiled: computed for a tile of tokens at a time, and once more in the backward pass: nothing is kept
    """

    name: str
    kind: Kind
    flops: float = 0.0
    shape: tuple[int, int] = (0, 0)
    moved: float = 0.0
    moved_back: float = 0.0
    kept: float = 0.0
    back: float = 0.0
    split: bool = True
    experts: int = 0
    share: float = 1.0
    tiled: bool = False


def mixer_ops(job: Job) -> Iterator[Op]:
    """Yield the operations of a mixer between a layer's first norm and its residual sum."""
    mixer = job.shape.mixer
    assert mixer
    *into, (inner, outer) = mixer.products
    for one in into:
        yield Op("mixer in", "product", 2 * one[0] * one[1], one)
    if mixer.kind == SPACE:
        # The multipliers of Falcon-H1 are a tensor in fp32, and so is what it multiplies.
        wide = 2 if job.autocast and mixer.beside else 1
        yield from _scan(mixer, sum(width for _, width in into), wide)
        yield Op("mixer out", "product", 2 * inner * outer, (inner, outer))
        return
    # The kernel reads and writes each element once, and keeps its input; torch's copies it before and after.
    width = mixer.convolved
    kept = 2 * into[0][1] if mixer.kind == SCAN else 2 * width  # which is a part of what the first product gives
    yield Op("convolution", "pointwise", moved=4 * width, moved_back=8 * width, kept=kept)
    yield from _BEHIND[mixer.kind](job, mixer)
    yield Op("mixer out", "product", 2 * inner * outer, (inner, outer), kept=2 * inner)


def _gates(job: Job, mixer: Mixer) -> Iterator[Op]:
    """Yield the two products of LFM2 around its convolution, which keep all three parts of what `in` gives, and the result."""
    width = mixer.convolved
    yield Op("gates", "pointwise", moved=12 * width, moved_back=24 * width, kept=8 * width)


def _scan(mixer: Mixer, width: int, wide: int) -> Iterator[Op]:
    """Yield a state space from its first product to its last, whose convolution, scan, gate and norm are one function
    (MambaSplitConv1dScanCombinedFn of mamba_ssm/ops/triton/ssd_combined.py).

    It keeps what the first product gives, what the scan gives before the gate, and a number per group of its norm. Convolution,
    gate and norm are computed again in the backward pass, and so are the states. width: of the first product's output; wide: 2
    where it is in fp32
    """
    heads, inner = mixer.heads, mixer.heads * mixer.value_dim
    # For each group C with B, for each head the result with values, and the state written and read.
    pairs = mixer.chunk * 2 * (mixer.key_heads * mixer.key_dim + inner)
    flops = CONSTANTS.chunk_products * (pairs + 4 * inner * mixer.key_dim)
    yield Op("scan", "product", flops, (inner, max(1, flops // (2 * inner))))
    states = 4 * inner * mixer.key_dim / mixer.chunk
    moved = wide * (4 * width + 4 * mixer.convolved + 6 * inner) + 8 * heads + 2 * states
    kept = wide * (2 * width + 2 * inner) + 4 * mixer.key_heads
    again = wide * (2 * width + 2 * mixer.convolved + 6 * inner) + 12 * heads + 2 * states
    yield Op("state space", "pointwise", moved=moved, moved_back=3 * moved, kept=kept, back=again)


def _selective(job: Job, mixer: Mixer) -> Iterator[Op]:
    """Yield the norms of steps, B and C, and the selective scan (SelectiveScanFn).

    What the convolution gives is kept twice: as the product of steps, B and C reads it, and with tokens next to each other as the
    scan does. So does the scan have steps and gate copied, and keeps what it gives before the gate.
    """
    inner, state, (_, made) = mixer.heads, mixer.key_dim, mixer.products[1]
    wide = 4 if job.autocast else 2  # an fp32 weight's norm gives fp32, of which the product of steps makes a copy
    each = 4 if "norm" in job.kernels else 6 + wide + 2 * job.autocast
    yield Op("steps norm", "pointwise", moved=36 * made, moved_back=54 * made, kept=each * made)
    # Copies of three, then the scan, which reads them, and gives its result with and without the gate.
    moved = 12 * inner + 10 * inner + CONSTANTS.scan_exponential * inner * state
    moved_back = 4 * inner + 16 * inner + CONSTANTS.scan_exponential_back * inner * state
    kept = 10 * inner + 8 * inner * state / CONSTANTS.scan_chunk
    yield Op("selective scan", "pointwise", moved=moved, moved_back=moved_back, kept=kept, back=8 * inner + 12 * state)


def _rule(job: Job, mixer: Mixer) -> Iterator[Op]:
    """Yield the gated delta rule (ChunkGatedDeltaRuleFunction) and the gated norm behind it.

    The rule keeps normalised queries and keys, values, for each head a chunk's triangle and its two gates with what they are
    computed from. States at the chunks' borders are computed again in the backward pass.
    """
    heads, keys, values = mixer.heads, mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim
    kept = 4 * keys + 2 * values + heads * (2 * CONSTANTS.rule_chunk + 28)
    yield from _chunks_of_rule(mixer)
    states = 2 * heads * mixer.key_dim * mixer.value_dim / CONSTANTS.rule_chunk
    moved = 8 * keys + 6 * values + 4 * states
    yield Op("chunks", "pointwise", moved=moved, moved_back=3 * moved, kept=kept, back=2 * moved)
    if "norm" in job.kernels:
        yield Op("gated norm", "pointwise", moved=6 * values, moved_back=12 * values, kept=4 * values)
    else:  # in fp32: input, normalised, gate and its silu; in bf16 what the weight multiplies, twice
        moved, kept = 46 * values, 20 * values
        yield Op("gated norm", "pointwise", moved=moved, moved_back=69 * values, kept=kept, back=16 * values)


def _chunks_of_rule(mixer: Mixer) -> Iterator[Op]:
    """Yield the products of a delta rule's chunks.

    For each head: keys with keys, queries with keys, what the triangle makes of keys and values, and the state read, corrected
    and written.
    """
    values = mixer.heads * mixer.value_dim
    each = CONSTANTS.rule_chunk * (6 * mixer.key_dim + 4 * mixer.value_dim) + 6 * mixer.key_dim * mixer.value_dim
    flops = CONSTANTS.chunk_products * mixer.heads * each
    yield Op("rule", "product", flops, (values, max(1, flops // (2 * values))))


def _channel_rule(job: Job, mixer: Mixer) -> Iterator[Op]:
    """Yield Kimi's delta rule (ChunkKDAFunction), the gate of each channel before it, and the gated norm behind it.

    The gate is computed in fp32 by torch, one operation after the other: of KimiLinearForgetGate's autograd keeps a byte and
    three tensors. The rule keeps it once more, as it came and summed up
    within chunks, beside normalised queries and keys, values, and for each head two of a chunk's triangles. The norm is in fp32
    too, and no kernel has it.
    """
    width, heads, (*into, _) = mixer.heads * mixer.value_dim, mixer.heads, mixer.products
    between = sum(inner for inner, _ in into if inner != job.shape.hidden)  # what two of the products read
    moved, kept = 60.0, 13 * width + 2 * between
    yield Op("channels' gate", "pointwise", moved=moved * width, moved_back=1.5 * moved * width, kept=kept)
    yield from _chunks_of_rule(mixer)
    states = 2 * width * mixer.key_dim / CONSTANTS.rule_chunk
    # Queries, keys and values put together and apart, and the rule.
    moved = 12 * width + 12 * width + 22 * width + 4 * states
    kept = 14 * width + heads * (4 * CONSTANTS.rule_chunk + 10)
    back = 28 * width + 2 * states + heads * 8 * CONSTANTS.rule_chunk + 6 * width
    yield Op("chunks", "pointwise", moved=moved, moved_back=3 * moved, kept=kept, back=back)
    yield Op("gated norm", "pointwise", moved=46 * width, moved_back=69 * width, kept=16 * width, back=16 * width)


# Of a mixer's kind, the operations between its convolution and its last product.
_BEHIND = {RULE: _rule, CONVOLUTION: _gates, SCAN: _selective, CHANNELS: _channel_rule}
