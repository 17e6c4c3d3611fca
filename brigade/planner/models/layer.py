"""The operations of a decoder layer: what each computes, moves through memory and keeps for the backward pass.

One table serves two questions. Activation memory is the sum of what the operations keep; time is the sum of what they
compute and move. Bytes are per token, with activations in two bytes; h, q, kv and f are the widths of the residual
stream, the queries, keys and values together, and the MLP.

Kept and moved bytes are counted operation by operation. Without a kernel of its own a norm is what Transformers' modelling
code has autograd run (modeling_llama.py): it computes in fp32 and keeps its fp32 input and its normalised input. One kernel
keeps its input alone: Liger, Transformer Engine, or torch.compile, whose partitioner never computes again what a product
reads, so that the outputs of norm and activation are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .shape import Family, ModelShape

Kernels = frozenset[str]  # of "norm", "rotary", "mlp", "experts", "softmax": which of them are one kernel each
EAGER: Kernels = frozenset()
FUSED: Kernels = frozenset(("norm", "rotary", "mlp"))
Attention = Literal["eager", "flash1", "flash2", "flash3"]
Kind = Literal["product", "attention", "pointwise"]


@dataclass(frozen=True)
class Op:
    """One operation, per token.

    flops: forward; a product costs twice as much backward, attention 2.5 times (it computes the scores again)
    shape: of a product, (inner, outer) width of its weight
    moved, moved_back: bytes read and written, forward and backward
    kept: bytes for the backward pass
    back: bytes that its own backward pass needs besides, at its peak
    split: tensor parallelism divides it by itself (else only sequence parallelism does)
    gathered: under tensor parallelism it is gathered over the ranks before the next product
    experts: how many weights of that shape the tokens are spread over
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
    gathered: bool = False
    experts: int = 0


def layer_ops(
    shape: ModelShape,
    kernels: Kernels,
    attention: Attention,
    attended: float,
    *,
    moe: bool = False,
    repeat_kv: bool = False,
    dropout: bool = False,
    autocast: bool = False,
    adapters: Op | None = None,
) -> Iterator[Op]:
    """The forward pass of one layer, in the order in which it runs.

    attended: tokens that a token's attention sees at most (the sample's length, or the window); on average it sees half
    repeat_kv: keys and values are repeated to the queries' number before attention (SDPA in Transformers)
    autocast: products in bf16 over an fp32 residual stream, of which every product makes a bf16 copy of its own
    adapters: what they do beside the layer's own operations (adapter_costs.py)
    """
    h, q, kv, family = shape.hidden, shape.query_width, shape.key_value_width, shape.family
    readers = (1 if family.fused_qkv else 3, 2 if family.gated and not family.fused_gate else 1) if autocast else (1, 1)

    def norm(number: int) -> Iterator[Op]:
        into_product = number < 2  # Gemma's third and fourth go into the residual stream, which keeps nothing of them
        yield _norm(f"norm{number}", h, family, kernels, split=False, stream=autocast and into_product)
        if into_product:
            yield Op(f"norm{number} out", "pointwise", kept=2 * h * readers[number], split=False, gathered=True)

    yield from norm(0)
    yield Op("qkv", "product", 2 * h * (q + kv), (h, q + kv))
    turned = q + kv / 2
    if family.qk_norm:
        yield _norm("qk norm", turned, family, kernels)
    if family.rotary:
        moved = (4 if "rotary" in kernels else 20) * turned
        # Values that are a slice of one tensor keep all of it, queries and keys before they are turned too.
        sliced = family.fused_qkv and not (repeat_kv or (attention == "eager" and shape.kv_heads != shape.heads))
        yield Op("rotary", "pointwise", moved=moved, moved_back=moved, kept=2 * turned * sliced)
    yield from _attention(shape, kernels, attention, attended, repeat_kv, dropout)
    yield Op("out", "product", 2 * q * h, (q, h))
    if family.norms == 4:
        yield from norm(2)
    yield Op("residual", "pointwise", moved=12 * h, moved_back=6 * h, kept=2 * h * dropout, split=False)
    if adapters:
        yield adapters
    if family.norms > 1:  # else attention and MLP read the same one side by side
        yield from norm(1)
    if not moe:
        yield from _mlp(shape, shape.ffn, kernels, 1, autocast=autocast)
    else:
        if shape.shared_ffn:
            yield from _mlp(shape, shape.shared_ffn, kernels, 1)
        experts, top = shape.experts, shape.top_k
        yield Op("router", "product", 2 * h * experts, (h, experts), kept=4 * experts, split=False)
        yield from _mlp(shape, shape.expert_ffn, kernels, top, experts)
        # Each token's hidden state is copied for each of its experts, and their outputs are weighted and added: autograd keeps
        # the copies and the outputs, and goes back through the weighted outputs' gradients and what it multiplies them with.
        yield Op("dispatch", "pointwise", moved=8 * h * top, moved_back=8 * h * top, kept=4 * h * top, back=6 * h * top)
    if family.norms == 4:
        yield from norm(3)


def one_kernel(family: Family, kernels: Kernels) -> bool:
    """Whether a norm is one kernel, which keeps its input itself and no fp32 copy."""
    return "norm" in kernels or family.layer_norm


def _norm(name: str, width: float, family: Family, kernels: Kernels, split: bool = True, stream: bool = False) -> Op:
    """Unfused: cast 6, square 8, mean 4, scale 8, cast 6 and weight 4 bytes per element; back half as much again.

    stream: it reads an fp32 residual stream, and keeps that instead of a copy
    """
    if one_kernel(family, kernels):
        kept = (4 if stream else 2) * width
        return Op(name, "pointwise", moved=4 * width, moved_back=8 * width, kept=kept, split=split)
    normalised = 4 if family.fp32_norm or stream else 2  # what the weight multiplies
    return Op(name, "pointwise", moved=36 * width, moved_back=54 * width, kept=(4 + normalised) * width, split=split)


def _attention(
    shape: ModelShape, kernels: Kernels, kind: Attention, attended: float, repeat_kv: bool, dropout: bool
) -> Iterator[Op]:
    """Kept: queries, keys, values and the output; of the scores a number per head and token, or in eager attention all."""
    q, kv, heads = shape.query_width, shape.key_value_width, shape.heads
    keys_values = 4 * q if repeat_kv else 2 * kv
    if kind != "eager":
        kept, moved = 2 * q + keys_values + 2 * q + 4 * heads, 2 * keys_values * repeat_kv
        yield Op("attention", "attention", 4 * q * attended / 2, kept=kept, moved=moved)
        return
    # Scores go through memory: written, scaled and masked, softmax, (dropped,) read again. The mask saves no products.
    if "softmax" in kernels:
        # In bf16, and with dropout its mask and its output: 5 a s of Korthikanti et al., section 4.1.
        passes, kept, back = (11, 5, 2) if dropout else (8, 2, 2)
    elif shape.family.sinks:  # gpt-oss: softmax in bf16 over scores and sink, of which the product reads a slice
        passes, kept, back, keys_values = 12, 2, 4, 4 * q
    else:  # eager_attention_forward: softmax in fp32, and its bf16 copy, which the product reads
        passes, kept, back = (21, 7, 6) if dropout else (18, 6, 6)
        keys_values = 4 * q if shape.kv_heads > 1 else 2 * kv  # repeated, but for one head, which all queries can share
    scores, flops = heads * attended, 4 * q * attended
    once, again = passes * scores, 1.5 * passes * scores
    yield Op("scores", "attention", flops, moved=once, moved_back=again, kept=kept * scores, back=back * scores)
    yield Op("attention", "pointwise", kept=2 * q + keys_values + 2 * q)


def _mlp(
    shape: ModelShape, width: int, kernels: Kernels, times: int, experts: int = 0, autocast: bool = False
) -> Iterator[Op]:
    """Kept: gate, up and their product, and without a kernel of its own the activated gate.

    On the way back there are the product's gradient and those of its two factors, but no longer the product. A kernel of its
    own writes the two over what it kept. Under autocast the layer's gradient has a bf16 copy while `down` goes back.
    """
    h, family = shape.hidden, shape.family
    into = 2 if family.gated else 1
    kept, moved, back = ((6, 6, 0) if "mlp" in kernels else (8, 10, 4)) if family.gated else (4, 4, 2)
    if family.clamped and "experts" not in kernels:
        # Gate and up in one tensor, each clamped, sigmoid, gate x sigmoid, up + 1, and the product.
        kept, moved, back = 14, 28, 4
    wide = times * width
    yield Op("up", "product", 2 * h * into * wide, (h, into * width), experts=experts)
    moved_back = 1.7 * moved * wide
    yield Op("activation", "pointwise", moved=moved * wide, moved_back=moved_back, kept=kept * wide, back=back * wide)
    yield Op("down", "product", 2 * wide * h, (width, h), back=2 * wide + 2 * h * autocast, experts=experts)
