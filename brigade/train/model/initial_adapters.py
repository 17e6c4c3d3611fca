"""Adapters that begin as a part of each matrix of their base: PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775).

Both begin with adapters B A, and take this product from the base, so that the model computes what it did. Here the base stays as
it is, and adapters of twice the rank, [B, -B'] [A; A'], hold how they began, A' and B', which never change: the same function and
the same gradients, and what is saved fits the original model as it is.
"""

import math
from typing import Any

from ..recipe.model_section import ModelSection


def ranks_of(section: ModelSection) -> dict[str, Any]:
    """Return what PEFT is told of adapters' ranks as they are trained and saved, and of the alpha by which their scale is the
    recipe's."""
    times = section.rank_factor
    scale = math.sqrt(times) if section.use_rslora else times
    return {
        "r": section.lora_r * times,
        "lora_alpha": section.lora_alpha * scale,
        "rank_pattern": {name: rank * times for name, rank in section.rank_pattern.items()},
        "alpha_pattern": {name: alpha * scale for name, alpha in section.alpha_pattern.items()},
    }


def hold_beginning(model: Any) -> None:
    """Let the second half of each adapter's rank get no gradient, in place. An optimizer that treats each number by itself,
    without weight decay, then leaves it as it is."""
    for layer in adapted(model):
        for half in (layer.lora_A["default"], layer.lora_B["default"]):
            half.forward = _HalfTrained(half, 0 if half is layer.lora_A["default"] else 1)


def adapted(model: Any) -> list[Any]:
    """Return the layers of a model that have adapters."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


class _HalfTrained:
    """The forward pass of a linear layer without bias whose weight gets a gradient in its first half. dim: of the rank"""

    def __init__(self, layer: Any, dim: int) -> None:
        self.layer, self.dim = layer, dim

    def __call__(self, inputs: Any) -> Any:
        import torch

        trained, held = self.layer.weight.chunk(2, self.dim)
        return torch.nn.functional.linear(inputs, torch.cat([trained, held.detach()], self.dim))
