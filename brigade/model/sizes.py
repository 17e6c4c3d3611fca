"""Sizes of a model: its parameters, and the type that they are loaded in."""

from typing import TYPE_CHECKING, Any

from ..recipe.flags import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


def half_or_full(settings: Settings) -> "torch.dtype":
    """The recipe's precision: frozen weights have it under every strategy, and 4-bit ones compute in it."""
    import torch

    training = settings.recipe.training
    return torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32


def largest_parameter(config: "PreTrainedConfig") -> int:
    """Elements of the model's largest parameter, from a model on the meta device, which takes no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return max(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def parameter_count(model: Any, trained: bool = False) -> int:
    """Parameters of the whole model, or those that are trained, also where this rank holds a shard (DeepSpeed's
    ds_numel, DTensor's numel) or 4-bit weights in containers (bitsandbytes' quant_state)."""
    return sum(
        quantised.shape.numel() if (quantised := getattr(p, "quant_state", None)) else getattr(p, "ds_numel", p.numel())
        for p in model.parameters()
        if p.requires_grad or not trained
    )
