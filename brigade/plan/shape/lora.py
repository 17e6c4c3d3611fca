"""Find which of a model's linear layers have LoRA adapters, how wide they are, and how many parameters that makes.

targets names them, of the projections q, k, v and o, and m: the MLP. Slices of one product have one adapter, and experts have
none (docs/methods.md).
"""

from collections.abc import Collection, Iterator

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


def linears(shape: ModelShape, targets: str = ALL, *, moe: bool = False) -> Iterator[tuple[str, int, int]]:
    """Yield (what it reads, inner width, outer width) of a layer's linear layers that have adapters. shape: of layers alike"""
    h, q, kv, family = shape.hidden, shape.query_width, shape.key_value_width, shape.family
    made = "q" + "kv"[: shape.made]
    if family.fused_qkv and set(targets) & set("qkv"):
        yield "stream", h, q + kv
    elif not family.fused_qkv:
        yield from (("stream", h, {"q": q}.get(target, kv // 2)) for target in targets if target in made)
    if "o" in targets:
        yield "attention", q, h
    if "m" in targets and (width := shape.shared_ffn if moe else shape.ffn):
        into = 2 if family.gated else 1
        yield from [("mlp", h, into * width)] if family.fused_gate else [("mlp", h, width)] * into
        yield "activation", width, h
    if targets == ALL and shape.per_layer_input:
        yield from [("layer", h, shape.per_layer_input), ("input", shape.per_layer_input, h)]


def all_linears(shape: ModelShape, targets: str = ALL) -> Iterator[tuple[int, int, int]]:
    """Yield (how many layers have it, inner width, outer width) of the model's linear layers that have adapters."""
    for one, _ in shape.alike:
        for moe, count in one.kinds:
            yield from ((count, inner, outer) for _, inner, outer in linears(one, targets, moe=moe))


def lora_parameters(shape: ModelShape, rank: int, targets: str = ALL) -> int:
    """Return the parameters of adapters of `rank` on the targets of every layer; the head has none."""
    if (adapted := getattr(shape, "adapted", 0)) and targets == ALL:
        return rank * adapted
    return rank * sum(count * (inner + outer) for count, inner, outer in all_linears(shape, targets))


def trained_parameters(
    shape: ModelShape, rank: int, whole: Collection[str], targets: str = ALL, dora: bool = False
) -> int:
    """Return the parameters of adapters and of the ENDS in `whole`, which are trained whole beside them.

    With DoRA there is a magnitude for each row of a weight that has an adapter. A reward model's head is trained whole.
    """
    magnitudes = sum(count * outer for count, _, outer in all_linears(shape, targets)) if dora else 0
    beside = len(whole) * shape.vocab * shape.hidden + shape.scores * shape.hidden
    return lora_parameters(shape, rank, targets) + magnitudes + beside
