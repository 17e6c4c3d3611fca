"""Find which of a model's linear layers have LoRA adapters, how wide they are, and how many parameters that makes.

targets names them, of the projections q, k, v and o, and m: the MLP. Slices of one product have one adapter, and experts have
none (docs/methods.md).
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from .model_shape import ModelShape

ALL = "qkvom"
ENDS = ("embed_tokens", "lm_head")  # of the vocabulary's width, the modules that may be trained whole
# Names of linear layers in Transformers' models -> what of ALL they are; the MLP is all of one of the last sets.
NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "query_key_value": "qkv", "o_proj": "o"}
MLPS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def targets_of(modules: str | Collection[str]) -> str:
    """Return the targets that a recipe's lora_target_modules names; "" for layers that no formula knows."""
    if modules == "all-linear":
        return ALL
    named = {modules} if isinstance(modules, str) else set(modules)
    mlp = next((names for names in MLPS if names <= named), set())
    rest = named - mlp
    if not rest <= NAMES.keys():
        return ""
    letters = set("".join(NAMES[name] for name in rest)) | ({"m"} if mlp else set())
    return "".join(letter for letter in ALL if letter in letters)


class Linear(NamedTuple):
    """A linear layer that has an adapter.

    reads: what it reads; inner, outer: its widths; share: of the layers that have it
    """

    reads: str
    inner: int
    outer: int
    share: float = 1.0


def linears(shape: ModelShape, targets: str = ALL, *, moe: bool = False) -> Iterator[Linear]:
    """Yield a layer's linear layers that have adapters. shape: of layers alike"""
    attending, mixing, inside = shape.parts(moe)
    yield from (Linear(*one[:3], attending) for one in _of_attention(shape, targets) if attending)
    if shape.mixer and mixing:
        reads = {shape.hidden: "stream", shape.mixer.products[-1][0]: "mixed"}
        adapted = shape.mixer.adapted(targets, targets == ALL)
        yield from (Linear(reads.get(inner, "inside"), inner, outer, mixing) for inner, outer in adapted)
    yield from (Linear(*one[:3], inside) for one in _of_mlp(shape, targets, moe) if inside)
    if targets == ALL and shape.per_layer_input:
        yield Linear("layer", shape.hidden, shape.per_layer_input)
        yield Linear("input", shape.per_layer_input, shape.hidden)


def _of_attention(shape: ModelShape, targets: str) -> Iterator[Linear]:
    h, q, kv, family = shape.hidden, shape.query_width, shape.key_value_width, shape.family
    made = "q" + "kv"[: shape.made]
    if shape.projections:
        *into, last = shape.projections
        into = into if targets == ALL else [one for one in into if one == (h, q) and "q" in targets]
        yield from (Linear("stream" if inner == h else "latent", inner, outer) for inner, outer in into)
        yield from [Linear("attention", *last)] * ("o" in targets)
        return
    if family.fused_qkv and set(targets) & set("qkv"):
        yield Linear("stream", h, q + kv)
    elif not family.fused_qkv:
        yield from (
            Linear("stream", h, {"q": q * (1 + family.output_gate)}.get(target, kv // 2))
            for target in targets
            if target in made
        )
    if "o" in targets:
        yield Linear("attention", q, h)


def _of_mlp(shape: ModelShape, targets: str, moe: bool) -> Iterator[Linear]:
    h, family = shape.hidden, shape.family
    if "m" in targets and (width := shape.shared_ffn if moe else shape.ffn):
        into = 2 if family.gated else 1
        yield from [Linear("mlp", h, into * width)] if family.fused_gate else [Linear("mlp", h, width)] * into
        yield Linear("activation", width, h)


def all_linears(shape: ModelShape, targets: str = ALL) -> Iterator[tuple[int, int, int]]:
    """Yield (how many layers have it, inner width, outer width) of the model's linear layers that have adapters."""
    for one, _ in shape.alike:
        for moe, count in one.kinds:
            for found in linears(one, targets, moe=moe):
                yield round(count * found.share), found.inner, found.outer


def lora_parameters(shape: ModelShape, rank: int, targets: str = ALL) -> int:
    """Return the parameters of adapters of `rank` on the targets of every layer; the head has none."""
    adapted = getattr(shape, "adapted", 0)
    if adapted and targets == ALL:
        return rank * adapted
    return rank * sum(count * (inner + outer) for count, inner, outer in all_linears(shape, targets))


def trained_parameters(
    shape: ModelShape, rank: int, whole: Collection[str], targets: str = ALL, dora: bool = False, tokens: int = 0
) -> int:
    """Return the parameters of adapters, of the ENDS in `whole`, which are trained whole beside them, and of so many `tokens`.

    With DoRA there is a magnitude for each row of a weight that has an adapter. A reward model's head is trained whole.
    """
    magnitudes = sum(count * outer for count, _, outer in all_linears(shape, targets)) if dora else 0
    beside = len(whole) * shape.vocab * shape.hidden + shape.scores * shape.hidden
    return lora_parameters(shape, rank, targets) + magnitudes + beside + token_parameters(shape, tokens)


def token_parameters(shape: ModelShape, tokens: int) -> int:
    """Return the parameters of so many tokens that are trained: of the embeddings, and of a head that is not tied to them."""
    return tokens * shape.hidden * (1 if shape.tied or shape.scores else 2)
