"""A model's layers and loss, compiled by torch.compile."""

from typing import TYPE_CHECKING

import torch

from .. import upstream

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_layers(model: "PreTrainedModel") -> None:
    """Compile each decoder layer, in place, and the loss, before an engine wraps or shards the model.

    All layers share one program, which takes a fraction of a whole model's time to make, and the engines' hooks stay as they are.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in base.modules():
        if type(module).__name__ in upstream.layer_classes(base):
            module.compile()
    base.loss_function = torch.compile(base.loss_function, dynamic=True)
