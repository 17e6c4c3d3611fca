"""The sizes of layers that differ in them, read off a model that Transformers has built (Gemma 4)."""

import copy
from typing import TYPE_CHECKING

from ...errors import UserError
from ...train.model.per_layer import each_layers, sizes_that_differ
from ...train.upstream.experts import routers
from .model_shape import LayerSizes

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

KNOWN = {
    "head_dim",
    "num_key_value_heads",
}  # keys in which layers may differ; MLPs differ where keys and values are shared
FLASH_WIDTH = 256  # of a head, the most that FlashAttention takes
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def sizes_of_layers(kind: str, text: "PreTrainedConfig", layers: "nn.ModuleList") -> tuple[LayerSizes, ...]:
    """Return the sizes of each kind of layer, in the model's order; () where all layers have the same.

    kind: the model_type; text: the text model's config; layers: the decoder's
    Raises UserError for a model whose layers differ in something else, or are built otherwise than the config says.
    """
    differ = sizes_that_differ(text.to_dict())
    if not differ:
        return ()
    problem = f"the formulas describe layers of one size, and its layers differ in {', '.join(differ)}"
    refusal = UserError(f"model_type {kind!r}", problem, "measure it with a short run instead")
    configs, types = each_layers(text), list(getattr(text, "layer_types", None) or ())
    if not set(differ) <= KNOWN or not len(configs) == len(types) == len(layers):
        raise refusal
    kinds = []
    for layer, config, named in zip(layers, configs, types, strict=True):
        found = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
        widths = {name: getattr(found.get(name), "out_features", 0) for name in (*PROJECTIONS, *MLP)}
        heads, head_dim, kv_heads = text.num_attention_heads, config.head_dim, config.num_key_value_heads
        made = [name for name in ("k_proj", "v_proj") if widths[name]]
        as_said = widths["q_proj"] == heads * head_dim and widths["o_proj"] == widths["down_proj"] == text.hidden_size
        if not as_said or any(widths[name] != kv_heads * head_dim for name in made) or made == ["v_proj"]:
            raise refusal
        window = text.sliding_window if named == "sliding_attention" else 0
        kinds.append((widths["up_proj"], kv_heads, head_dim, window, len(made)))
    return tuple(LayerSizes(kinds.count(one), *one) for one in dict.fromkeys(kinds))


def largest(sizes: tuple[LayerSizes, ...]) -> LayerSizes | None:
    """Return the sizes of layers that have the most of everything, or None for none."""
    names = ("layers", "ffn", "kv_heads", "head_dim", "window", "made")
    return LayerSizes(*(max(getattr(one, name) for one in sizes) for name in names)) if sizes else None


def keeps_fp32(norm: "nn.Module") -> bool:
    """Return whether a norm's weight, on the meta device, multiplies in fp32, so that autograd keeps a second tensor in fp32."""
    return len(_kept_in_fp32(norm, norm.weight.numel())) > 1


def router_reads_fp32(model: "nn.Module", hidden: int) -> bool:
    """Return whether the routers of a model on the meta device read an fp32 copy of what they are given in bf16. False where no
    router of it can be run by itself."""
    try:
        return bool(_kept_in_fp32(routers(model)[0][0], hidden))
    except Exception:  # of any kind: it wants more than hidden states, or is a part of something else
        return False


def _kept_in_fp32(module: "nn.Module", width: int) -> set[int]:
    """Return which tensors of its inputs' shape in fp32 autograd keeps of a module in bf16, on the meta device."""
    import torch

    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    inputs = torch.empty(2, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        copy.deepcopy(module).to(torch.bfloat16)(inputs)
    return {id(one) for one in kept if one.dtype == torch.float32 and one.shape == inputs.shape}
