"""The dimensions of any decoder that Transformers can build, from the model itself on the meta device: for the architectures
that model_shape.FAMILIES does not know. Remembered like a trace, so that only the first call imports torch."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import UserError
from ...train import upstream
from ...train.model.config_json import ALIASES
from ...train.model.per_layer import sizes_that_differ
from ...train.upstream.experts import taken_for_experts
from .from_config import windows
from .model_shape import Family, ModelShape
from .trace import remembered

ATTENTION = re.compile(r"attn|attention")
EXPERTS = re.compile(r"(^|\.)experts\.")
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
# Kinds of layers that no formula here describes, by their names in `layer_types` and in modules.
NOT_ATTENTION = re.compile(r"linear_att|mamba|recurrent|conv|rwkv|ssm|retention|delta", re.I)


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
    def final_norm(self) -> int:
        """What is neither embedding, head nor layer."""
        layers = self.dense_layers * self.dense_layer + self.moe_layers * self.moe_layer
        return self.parameters - self.embedding - self.head - layers


def shape_from_model(config: Mapping[str, Any], name: str = "") -> MeasuredShape:
    """Return the shape of a model with this config.json.

    Raises UserError where Transformers cannot build it, or it is no decoder of attention.
    """
    description = remembered(config, {"described": True}, lambda: asdict(_describe(config)))
    return MeasuredShape(
        **description | {"family": Family(**description["family"]), "name": name or description["name"]}
    )


def _describe(config: Mapping[str, Any]) -> MeasuredShape:
    import torch

    from .traced_model import build, decoder_layers

    with torch.device("meta"):
        model = build(config)
    text, kind = model.config.get_text_config(), str(config.get("model_type"))
    _, _, layers = decoder_layers(model)
    if differ := sizes_that_differ(text.to_dict()):
        problem = f"the formulas describe layers of one size, and its layers differ in {', '.join(differ)}"
        raise UserError(f"model_type {kind!r}", problem, "measure it with a short run instead")
    _check_attention(kind, text, layers)

    def number(key: str, default: int = 0) -> int:
        """The config's, by any of its names."""
        found = next((v for name in (key, *ALIASES.get(key, ())) if (v := getattr(text, name, None))), default)
        return max(found) if isinstance(found, (list, tuple)) else int(found)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("qk_head_dim") or number("head_dim") or hidden // heads
    widths = {name: found for name, module in layers.named_modules() if (found := _widths(module))}
    taken = taken_for_experts(model, list(widths)) if hasattr(text, "num_experts_per_tok") else ()
    counted = [_parts(layer) for layer in layers]
    dense, moe = [one for one in counted if not one["experts"]], [one for one in counted if one["experts"]]
    experts = int(moe[0]["experts"]) if moe else 0
    each = sum(one["in_experts"] for one in moe) // len(moe) // experts if moe else 0
    gated_experts = any("gate" in name or "w3" in name for name, _ in layers.named_parameters() if EXPERTS.search(name))
    ffn = number("intermediate_size") or 4 * hidden
    gated = max(one["mlp"] for one in dense) > 2.5 * hidden * ffn if dense else gated_experts
    into, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is None or output.weight is into
    embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    norms = [
        (n, m)
        for n, m in layers[0].named_modules()
        if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None
    ]
    window, windowed = windows(text.to_dict(), len(layers))
    first, last = ([name for name, _ in layers[place].named_modules()] for place in (0, -1))
    family = Family(
        gated=gated,
        norms=sum(m.weight.numel() == hidden and not ATTENTION.search(n.rpartition(".")[0]) for n, m in norms),
        qk_norm=any(re.search(r"(q|k|query|key)_(layer)?norm$", name) for name, _ in norms),
        layer_norm=any(isinstance(module, torch.nn.LayerNorm) for _, module in norms),
        norm_bias=any(getattr(module, "bias", None) is not None for _, module in norms),
        tied=tied,
        fused_qkv=any(name.rpartition(".")[2] in FUSED_QKV for name in last),
        fused_gate=any(name.endswith("gate_up_proj") for name in first),
        rotary=any("rotary" in type(module).__name__.lower() for module in model.modules()),
        eager=not upstream.supports(model, "sdpa"),
    )
    return MeasuredShape(
        kind,
        len(layers),
        hidden,
        ffn,
        heads,
        _key_value_heads(layers[-1], heads, head_dim),
        head_dim,
        number("vocab_size"),
        tied=tied,
        experts=experts,
        top_k=number("num_experts_per_tok") if moe else 0,
        expert_ffn=each // ((3 if gated_experts else 2) * hidden),
        shared_ffn=max((one["shared"] for one in moe), default=0) // (3 * hidden),
        moe_layers=len(moe),
        window=window,
        windowed_layers=windowed,
        family=family,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=sum(embeddings.values()),
        head=0 if tied else sum(p.numel() for p in output.parameters()),
        dense_layer=sum(one["all"] for one in dense) // max(len(dense), 1),
        moe_base=sum(one["all"] - one["in_experts"] for one in moe) // max(len(moe), 1),
        expert=each,
        adapted=sum(sum(found) for name, found in widths.items() if name.rpartition(".")[2] not in taken),
    )


def _check_attention(kind: str, text: Any, layers: Any) -> None:
    """Raise UserError for a model whose layers are not all attention and an MLP."""
    types = {str(one) for one in getattr(text, "layer_types", None) or () if NOT_ATTENTION.search(str(one))}
    others = {type(module).__name__ for module in layers.modules() if NOT_ATTENTION.search(type(module).__name__)}
    plain = sum(any(ATTENTION.search(name) for name, _ in layer.named_modules()) for layer in layers)
    found = sorted(types or others - {"Conv1D"})  # GPT-2's name for a linear layer
    if found or plain < len(layers) or not getattr(text, "num_attention_heads", None):
        what = ", ".join(found[:3]) or f"{len(layers) - plain} of {len(layers)} layers without attention"
        problem = f"the formulas describe decoders of attention and MLP, and it has {what}"
        raise UserError(f"model_type {kind!r}", problem, "measure it with a short run instead")


def _widths(module: Any) -> tuple[int, int] | None:
    """(in, out) of a linear layer."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return tuple(module.weight.shape) if isinstance(module, (torch.nn.Linear, Conv1D)) else None


def _parts(layer: Any) -> dict[str, int]:
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
        elif parameter.dim() == 2 and not ATTENTION.search(name):
            found["mlp"] += parameter.numel()
    return found


def _key_value_heads(layer: Any, heads: int, head_dim: int) -> int:
    """The number of key-value heads, by the projections' widths, for configs name it in many ways. All heads where keys come
    from a latent vector."""
    for name, module in layer.named_modules():
        last, widths = name.rpartition(".")[2], _widths(module)
        if not widths or not ATTENTION.search(name):
            continue
        out = module.nf if hasattr(module, "nf") else widths[0]
        if last in ("k_proj", "key"):
            return max(1, out // head_dim)
        if last in FUSED_QKV:
            return max(1, (out // head_dim - heads) // 2)
    return heads
