"""The dimensions of any decoder that Transformers can build, from the model itself on the meta device: for the architectures
that model_shape.FAMILIES does not know. Remembered, so that only the first call imports torch."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from ...errors import UserError
from ...errors.tables import Document
from ...train import upstream
from ...train.model.config_json import ALIASES
from ...train.model.per_layer import widest_head
from ...train.model.sizes import beyond_texts
from ...train.upstream.experts import beside_mamba, taken_for_experts
from . import built
from .from_config import scales_logits, windows
from .model_shape import Family, Mixer, ModelShape

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

ACTIVATIONS = ("hidden_act", "mlp_hidden_act")
EXPERTS = re.compile(r"(^|\.)experts\.")
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
# What no formula here describes, by names in `layer_types` and of modules.
NOT_ATTENTION = re.compile(r"linear_att|mamba|recurrent|conv|rwkv|(?-i:SSM|\bssm)|retention|delta", re.I)


@dataclass(frozen=True)
class MeasuredShape(ModelShape):
    """A ModelShape whose parameters were counted. Means over the layers of a kind where they differ.

    adapted: widths in and out of the decoder's linear layers that adapters fit, summed: what one rank of adapters has
    """

    parameters: int = 0
    embedding: int = 0
    head: int = 0
    dense_layer: int = 0
    moe_base: int = 0
    expert: int = 0
    adapted: int = 0

    @property
    def scoring(self) -> "MeasuredShape":
        parameters = self.parameters - self.head + self.hidden
        return replace(self, scores=True, tied=False, head=self.hidden, parameters=parameters)

    @property
    def final_norm(self) -> int:
        """What is neither embedding, head, layer nor beside the decoder."""
        layers = self.dense_layers * self.dense_layer + self.moe_layers * self.moe_layer
        return self.parameters - self.embedding - self.head - layers - self.other


def shape_from_model(config: Document, name: str = "") -> MeasuredShape:
    """Return the shape of a model with this config.json.

    Raises UserError where Transformers cannot build it, or it is no decoder of attention.
    """
    description = built.remembered(config, {"described": True}, lambda: asdict(_describe(config)))
    return TypeAdapter(MeasuredShape).validate_python(description | {"name": name or description["name"]})


def _describe(config: Document) -> MeasuredShape:
    import torch

    with torch.device("meta"):
        model = built.build(config)
    text, kind = model.config.get_text_config(), str(config.get("model_type"))
    _, _, layers = built.decoder_layers(model)
    sizes = built.sizes_of_layers(kind, text, layers)
    most = built.largest(sizes)
    types = list(map(str, getattr(text, "layer_types", None) or ()))
    mixer, attending = built.mixer_of(types, layers)
    apart = mixer is not None and not set(built.APART).isdisjoint(types)
    _check_attention(kind, text, attending, mixer)

    def number(key: str, default: int = 0) -> int:
        """The config's, by any of its names."""
        found = next((v for name in (key, *ALIASES.get(key, ())) if (v := getattr(text, name, None))), default)
        return max(found) if isinstance(found, (list, tuple)) else int(found)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = most.head_dim if most else number("qk_head_dim") or number("head_dim") or hidden // heads
    output = model.get_output_embeddings()
    outside = {id(one) for part in beyond_texts(model).values() for one in part.modules()} | {id(output)}
    widths = {
        name: found
        for name, module in model.named_modules()
        if id(module) not in outside and (found := _widths(module))
    }
    taken = taken_for_experts(model, list(widths)) if hasattr(text, "num_experts_per_tok") else set()
    taken |= beside_mamba(model, list(widths)) if mixer else set()
    counted = [_parts(layer) for layer in layers]
    dense, moe = [one for one in counted if not one["experts"]], [one for one in counted if one["experts"]]
    experts = int(moe[0]["experts"]) if moe else 0
    latent = getattr(text, "moe_latent_size", None)
    if latent:
        problem = f"the formulas describe experts that read the residual stream, and its read {latent} numbers"
        raise UserError(f"model_type {kind!r}", f"{problem} made of it", "measure it with a short run instead")
    each = sum(one["in_experts"] for one in moe) // len(moe) // experts if moe else 0
    names = [name for name, _ in layers.named_parameters()]
    gated_experts = any("gate" in name or "w3" in name for name in names if EXPERTS.search(name))
    ffn = number("intermediate_size") or 4 * hidden
    gated = max(one["mlp"] for one in dense) > 2.5 * hidden * ffn if dense else gated_experts
    if apart:  # by name: other layers have no MLP, and mixers have matrices as large
        gated = any("gate_proj" in name or "gate_up_proj" in name for name in names)
    made = 0 if most else _built_width([*attending, *layers], hidden)
    if most:
        ffn = most.ffn
    elif made not in (0, ffn):  # LFM2's code makes less than its config says
        ffn, gated = made, True
    into = model.get_input_embeddings().weight
    tied = output is None or output.weight is into
    beside = {id(p): p.numel() for part in beyond_texts(model).values() for p in part.parameters()}
    embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings = {place: count for place, count in embeddings.items() if place not in beside}
    second = number("hidden_size_per_layer_input")
    window, windowed = windows(text.to_dict(), len(layers))
    first, last = ([name for name, _ in attending[place].named_modules()] for place in (0, -1))
    key_value_heads = most.kv_heads if most else _key_value_heads(attending[-1], heads, head_dim)
    family = Family(
        gated=gated,
        **built.norms_of(attending[0], hidden),
        capped=bool(getattr(text, "final_logit_softcapping", None)),
        fp32_router=bool(moe) and built.router_reads_fp32(model, hidden),
        squared=any(getattr(text, key, None) == "relu2" for key in ACTIVATIONS),
        scaled=scales_logits(text.to_dict()),
        tied=tied,
        fused_qkv=any(name.rpartition(".")[2] in FUSED_QKV for name in last),
        fused_gate=any(name.endswith("gate_up_proj") for name in first),
        rotary=any("rotary" in type(module).__name__.lower() for module in model.modules()),
        eager=not upstream.supports(model, "sdpa"),
        output_gate=any(
            name.endswith("q_proj") and (_widths(module) or (0, 0))[0] == 2 * heads * head_dim
            for name, module in attending[-1].named_modules()
        ),
    )
    return MeasuredShape(
        kind,
        len(layers),
        hidden,
        ffn,
        heads,
        key_value_heads,
        head_dim,
        number("vocab_size"),
        tied=tied,
        experts=experts,
        top_k=number("num_experts_per_tok") if moe else 0,
        expert_ffn=each // ((2 + gated_experts) * hidden),
        shared_ffn=max((one["shared"] for one in moe), default=0) // ((2 + gated_experts) * hidden)
        or (ffn if most and moe else 0),
        moe_layers=len(moe),
        mixer=mixer,
        apart=apart,
        mlp_layers=types.count("mlp") * apart,
        projections=_projections(attending[-1]) if number("kv_lora_rank") else (),
        window=window,
        windowed_layers=windowed,
        other=sum(beside.values()),
        sizes=sizes,
        masked=bool(sizes) and widest_head(text) > built.FLASH_WIDTH,
        per_layer_input=second,
        looked_up=max(embeddings.values()) if second else 0,
        family=family,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=sum(embeddings.values()),
        head=0 if tied else sum(p.numel() for p in output.parameters()),
        dense_layer=sum(one["all"] for one in dense) // max(len(dense), 1),
        moe_base=sum(one["all"] - one["in_experts"] for one in moe) // max(len(moe), 1),
        expert=each,
        adapted=sum(sum(found) for name, found in widths.items() if name.rpartition(".")[2] not in taken),
    )


def _projections(layer: "nn.Module") -> tuple[tuple[int, int], ...]:
    """The widths of the linear layers of attention with a latent vector, its output's at the end; () where they are not clear.
    Without those that choose tokens (an indexer)."""
    inside = _attention_of(layer)
    found = [(name, module) for name, module in built.linear_layers(layer) if name in inside and "indexer" not in name]
    if [name.endswith("o_proj") for name, _ in found].count(True) != 1:
        return ()
    found.sort(key=lambda one: one[0].endswith("o_proj"))
    return tuple((module.in_features, module.out_features) for _, module in found)


def _check_attention(kind: str, text: "PreTrainedConfig", layers: "Sequence[nn.Module]", mixer: Mixer | None) -> None:
    """Raise UserError for a model whose layers are not all attention and an MLP. layers: those that have no mixer in the place of
    attention"""
    named = () if mixer else getattr(text, "layer_types", None) or ()
    types = {str(one) for one in named if NOT_ATTENTION.search(str(one))}
    others = {type(m).__name__ for layer in layers for m in layer.modules() if NOT_ATTENTION.search(type(m).__name__)}
    plain = sum(bool(_attention_of(layer)) for layer in layers)
    others -= {"Conv1d"} if mixer and mixer.beside else {"Conv1D"}  # the mixer's; GPT-2's name for a linear layer
    found = sorted(types or others)
    if found or plain < len(layers) or not getattr(text, "num_attention_heads", None):
        what = ", ".join(found[:3]) or f"{len(layers) - plain} of {len(layers)} layers without attention"
        problem = f"the formulas describe decoders of attention and MLP, and it has {what}"
        raise UserError(f"model_type {kind!r}", problem, "measure it with a short run instead")


def _attention_of(layer: "nn.Module") -> set[str]:
    """The names of modules that are attention or in it: they say so, or a class around them does (Nemotron-H's `mixer`)."""
    modules = list(layer.named_modules())
    around = tuple(f"{name}." for name, module in modules if name and type(module).__name__.endswith("Attention"))
    return {name for name, _ in modules if built.ATTENTION.search(name) or f"{name}.".startswith(around)}


def _widths(module: "nn.Module") -> tuple[int, int] | None:
    """(in, out) of a linear layer."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return tuple(module.weight.shape) if isinstance(module, (torch.nn.Linear, Conv1D)) else None


def _built_width(layers: "Sequence[nn.Module]", hidden: int) -> int:
    """The width of the gated MLP of the first layer that has one by three linear layers, and no experts; 0 where none has."""
    import torch

    for layer in layers:
        mlp = [
            (module.in_features, module.out_features)
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear) and not built.ATTENTION.search(name)
        ]
        widths = {one if other == hidden else other for one, other in mlp}
        if len(mlp) == 3 and len(widths) == 1 and not any(EXPERTS.search(name) for name, _ in layer.named_parameters()):
            return widths.pop()
    return 0


def _parts(layer: "nn.Module") -> dict[str, int]:
    """Parameters of one layer, all and by place, and how many experts it has."""
    found = {"all": 0, "in_experts": 0, "shared": 0, "mlp": 0, "experts": 0}
    for name, parameter in layer.named_parameters():
        found["all"] += parameter.numel()
        if EXPERTS.search(name):
            found["in_experts"] += parameter.numel()
            own = re.search(r"(?:^|\.)experts\.(\d+)\.", name)
            found["experts"] = max(found["experts"], int(own[1]) + 1 if own else parameter.shape[0])
        elif "shared_expert" in name and parameter.dim() == 2:
            found["shared"] += parameter.numel() * (min(parameter.shape) > 1)  # not its gate
        elif parameter.dim() == 2 and not built.ATTENTION.search(name):
            found["mlp"] += parameter.numel()
    return found


def _key_value_heads(layer: "nn.Module", heads: int, head_dim: int) -> int:
    """The number of key-value heads, by the projections' widths, for configs name it in many ways. All heads where keys come
    from a latent vector."""
    inside = _attention_of(layer)
    for name, module in layer.named_modules():
        last, widths = name.rpartition(".")[2], _widths(module)
        if not widths or name not in inside:
            continue
        out = module.nf if hasattr(module, "nf") else widths[0]
        if last in ("k_proj", "key"):
            return max(1, out // head_dim)
        if last in FUSED_QKV:
            return max(1, (out // head_dim - heads) // 2)
    return heads
