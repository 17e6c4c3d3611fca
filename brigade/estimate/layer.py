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

from .shape import ModelShape

Kernels = frozenset[str]  # of "norm", "rotary", "mlp": which of them are one kernel each
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
    split: bool = True
    gathered: bool = False
    experts: int = 0


def layer_ops(shape: ModelShape, kernels: Kernels, attention: Attention, attended: float, *,
              moe: bool = False, repeat_kv: bool = False, dropout: bool = False,
              adapters: bool = False) -> Iterator[Op]:  # fmt: skip
    """The forward pass of one layer.

    attended: tokens that a token's attention sees at most (the sample's length, or the window); on average it sees half
    repeat_kv: keys and values are repeated to the queries' number before attention (SDPA in Transformers)
    adapters: LoRA on every linear layer, experts aside
    """
    h, q, kv = shape.hidden, shape.query_width, shape.key_value_width
    for number in range(shape.family.norms):
        yield _norm(f"norm{number}", h, "norm" in kernels, split=False)
        if number < 2:  # Gemma's third and fourth go into the residual stream, which keeps nothing of them
            yield Op(f"norm{number} out", "pointwise", kept=2 * h, split=False, gathered=True)
    yield Op("qkv", "product", 2 * h * (q + kv), (h, q + kv))
    turned = q + kv / 2
    if shape.family.qk_norm:
        yield _norm("qk norm", turned, "norm" in kernels)
    if shape.family.rotary:
        moved = (4 if "rotary" in kernels else 20) * turned
        yield Op("rotary", "pointwise", moved=moved, moved_back=moved)
    yield from _attention(shape, attention, attended, repeat_kv, dropout)
    yield Op("out", "product", 2 * q * h, (q, h))
    yield Op("residual", "pointwise", moved=12 * h, moved_back=6 * h, kept=2 * h * dropout, split=False)
    if adapters:
        # Each layer's input is read again, and what the adapter gives is written, scaled and added to the layer's own output.
        outer, inner = q + kv + h, h + q
        if not moe:
            outer, inner = outer + (3 if shape.family.gated else 2) * shape.ffn, inner + h + shape.ffn
        yield Op("adapters", "pointwise", moved=10 * outer + 2 * inner, moved_back=10 * outer + 4 * inner)
    if not moe:
        yield from _mlp(shape, shape.ffn, kernels, 1)
        return
    if shape.shared_ffn:
        yield from _mlp(shape, shape.shared_ffn, kernels, 1)
    experts, top = shape.experts, shape.top_k
    yield Op("router", "product", 2 * h * experts, (h, experts), kept=8 * experts, split=False)
    # Each token's hidden state is copied for each of its experts, and their outputs are weighted and added.
    yield Op("dispatch", "pointwise", moved=8 * h * top, moved_back=8 * h * top, kept=4 * h * top)
    yield from _mlp(shape, shape.expert_ffn, kernels, top, experts)


def _norm(name: str, width: float, fused: bool, split: bool = True) -> Op:
    """Unfused: cast 6, square 8, mean 4, scale 8, cast 6 and weight 4 bytes per element; back half as much again."""
    if fused:
        return Op(name, "pointwise", moved=4 * width, moved_back=8 * width, kept=2 * width, split=split)
    return Op(name, "pointwise", moved=36 * width, moved_back=54 * width, kept=6 * width, split=split)


def _attention(shape: ModelShape, kind: Attention, attended: float, repeat_kv: bool, dropout: bool) -> Iterator[Op]:
    q, kv, heads = shape.query_width, shape.key_value_width, shape.heads
    if kind != "eager":
        keys_values = 4 * q if repeat_kv else 2 * kv
        yield Op("attention", "attention", 4 * q * attended / 2, kept=2 * q + keys_values + 2 * q + 4 * heads,
                 moved=2 * keys_values * repeat_kv)  # fmt: skip
        return
    # Scores go through memory: written, scaled and masked, softmax, (dropped,) read again. Autograd keeps softmax's output,
    # and with dropout its mask and its output (5 a s of Korthikanti et al., section 4.1). The mask saves no products.
    passes, kept = (11, 5) if dropout else (8, 2)
    scores = heads * attended
    yield Op(
        "scores",
        "attention",
        4 * q * attended,
        kept=kept * scores,
        moved=passes * scores,
        moved_back=1.5 * passes * scores,
    )
    yield Op("attention", "pointwise", kept=2 * q + 2 * kv + 2 * q)


def _mlp(shape: ModelShape, width: int, kernels: Kernels, times: int, experts: int = 0) -> Iterator[Op]:
    """Kept: gate, up and their product, and without a kernel of its own the activated gate."""
    h, gated = shape.hidden, shape.family.gated
    into = 2 if gated else 1
    kept, moved = ((6, 6) if "mlp" in kernels else (8, 10)) if gated else (4, 4)
    wide = times * width
    yield Op("up", "product", 2 * h * into * wide, (h, into * width), experts=experts)
    yield Op("activation", "pointwise", moved=moved * wide, moved_back=1.7 * moved * wide, kept=kept * wide)
    yield Op("down", "product", 2 * wide * h, (width, h), experts=experts)


def kept_bytes(ops: list[Op], tensor: int = 1, sequence_parallel: bool = True, keep_gathered: bool = False,
               without: frozenset[str] = frozenset()) -> float:  # fmt: skip
    """Bytes per token that one rank keeps of one layer, but for the operations named in `without`.

    keep_gathered: what was gathered for a product stays, instead of being gathered again
    """
    total = 0.0
    for op in ops:
        divided = (op.split or sequence_parallel) and not (op.gathered and keep_gathered)
        total += 0.0 if op.name in without else op.kept / (tensor if divided else 1)
    return total
