"""What LoRA adds to a layer: parameters, what autograd keeps, and what goes through memory beside the products.

Adapters lie on linear layers: targets names them, of the projections q, k, v and o, and m: the MLP. Slices of one product have
one adapter, and experts have none (docs/methods.md).
"""

from collections.abc import Collection, Iterator

from ..choice.job import Job
from .shape import ModelShape

ALL = "qkvom"
ENDS = ("embed_tokens", "lm_head")  # of the vocabulary's width, the modules that may be trained whole
# Names of linear layers in Transformers' models -> what of ALL they are; the MLP is all of one of the last sets.
NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "query_key_value": "qkv", "o_proj": "o"}
MLPS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def targets_of(modules: str | Collection[str]) -> str:
    """The targets that a recipe's lora_target_modules names; "" for layers that no formula knows."""
    if modules == "all-linear":
        return ALL
    named = {modules} if isinstance(modules, str) else set(modules)
    mlp = next((names for names in MLPS if names <= named), set())
    rest = named - mlp
    if not rest <= NAMES.keys():
        return ""
    found = set("".join(NAMES[name] for name in rest)) | ({"m"} if mlp else set())
    return "".join(one for one in ALL if one in found)


def linears(shape: ModelShape, targets: str = ALL, *, moe: bool = False) -> Iterator[tuple[str, int, int]]:
    """(what it reads, inner width, outer width) of a layer's linear layers that have adapters."""
    h, q, kv, family = shape.hidden, shape.query_width, shape.key_value_width, shape.family
    if family.fused_qkv and set(targets) & set("qkv"):
        yield "stream", h, q + kv
    elif not family.fused_qkv:
        yield from (("stream", h, {"q": q}.get(one, kv // 2)) for one in targets if one in "qkv")
    if "o" in targets:
        yield "attention", q, h
    if "m" in targets and (width := shape.shared_ffn if moe else shape.ffn):
        into = 2 if family.gated else 1
        yield from [("mlp", h, into * width)] if family.fused_gate else [("mlp", h, width)] * into
        yield "activation", width, h


def all_linears(shape: ModelShape, targets: str = ALL) -> Iterator[tuple[int, int, int]]:
    """(how many layers have it, inner width, outer width) of the model's linear layers that have adapters."""
    for moe, count in shape.kinds:
        yield from ((count, inner, outer) for _, inner, outer in linears(shape, targets, moe=moe))


def lora_parameters(shape: ModelShape, rank: int, targets: str = ALL) -> int:
    """Of adapters of `rank` on the targets of every layer; not on the head."""
    if (adapted := getattr(shape, "adapted", 0)) and targets == ALL:
        return rank * adapted
    return rank * sum(count * (inner + outer) for count, inner, outer in all_linears(shape, targets))


def trained_parameters(
    shape: ModelShape, rank: int, whole: Collection[str], targets: str = ALL, dora: bool = False
) -> int:
    """Of adapters, with DoRA a magnitude for each row of a weight that has one, and of the ENDS in `whole`, which are trained
    whole beside them."""
    magnitudes = sum(count * outer for count, _, outer in all_linears(shape, targets)) if dora else 0
    return lora_parameters(shape, rank, targets) + magnitudes + len(whole) * shape.vocab * shape.hidden


# Bytes that go through memory for each number of a weight while DoRA takes the norm of its rows, and those that stand at most.
# PEFT 0.21.2 (tuners/lora/dora.py) makes B A whole, scales it, adds the weight and takes the norm: in bf16, or in fp32 where
# adapters are in fp32, with copies of B A and the weight.
NORM_MOVED, NORM_STANDS = {False: 14, True: 36}, {False: 6, True: 18}


def adapter_bytes(job: Job, moe: bool) -> float:
    """What a layer keeps more (or less) per token where its weights are frozen and adapters lie on the job's targets.

    A frozen norm does not keep what its weight multiplies, a frozen linear layer without adapter not what it reads. Adapters in
    bf16 read what their linear layers read. In fp32 each has a copy of its own: PEFT casts its input (_cast_input_dtype), and
    autocast back. An adapter that drops has a copy too, and a byte of mask. DoRA keeps what the linear layer and its adapter
    give, for the gradient of their magnitudes.
    """
    shape, targets, dropout = job.shape, job.targets, job.adapter_dropout
    h, family, top = shape.hidden, shape.family, shape.top_k
    less = 0.0
    if not job.one_kernel_norm:
        queries = (shape.query_width + shape.key_value_width / 2) * family.qk_norm
        less += (4 if family.fp32_norm else 2) * (2 * h + queries)
    if not set(targets) & set("qkv"):
        less += 2 * h
    if moe:
        less += 2 * h + 2 * top * h + 2 * top * shape.expert_ffn
    elif "m" not in targets:
        less += 2 * h + 2 * shape.ffn
    read = list(linears(shape, targets, moe=moe))
    inputs = sum(inner for _, inner, _ in read)
    # What a copy replaces; attention keeps its own output in any case.
    shared = sum({name: inner for name, inner, _ in read if name != "attention"}.values())
    more = 2 * (inputs - shared) if job.adapter_copies or dropout else 0
    return more + inputs * dropout + 4 * job.dora * sum(outer for _, _, outer in read) - less


def adapter_traffic(job: Job, moe: bool) -> tuple[float, float]:
    """Bytes per token (forward, backward) that adapters read and write between a layer's products, by eager kernels, as PEFT runs
    them, with activations in two bytes.

    Of what each reads: A reads it (2); a copy is cast to fp32 and back (12), dropped from (9 in fp32, 5 in bf16, its mask among
    them). Of what each gives: B writes it (2), it is scaled (4) and added to the layer's own output (6). Backward, gradients take
    the same ways, and are added up where several adapters read one thing. DoRA multiplies both results by magnitudes, scales
    and adds them up, in fp32 where adapters are.
    """
    copies = job.adapter_copies
    read = list(linears(job.shape, job.targets, moe=moe))
    inner, outer = float(sum(i for _, i, _ in read)), float(sum(o for _, _, o in read))
    between = 12 * copies + (9 if copies else 5) * job.adapter_dropout
    given, back = ((50, 46) if copies else (26, 30)) if job.dora else (12, 8)
    return (2 + between) * inner + given * outer, (8 + between) * inner + back * outer
