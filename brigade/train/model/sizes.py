"""A model's parameters: how many there are, of which type, and which of them texts do not reach."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from .. import upstream
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def half_or_full(settings: Settings) -> torch.dtype:
    """Return the recipe's precision: frozen weights have it under every strategy, and 4-bit ones compute in it."""
    import torch

    training = settings.recipe.training
    return torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32


def model_class(settings: Settings) -> type[PreTrainedModel]:
    """Return Transformers' class that builds a run's model: with its vision tower where rows have images."""
    return upstream.auto_class_for(settings.recipe.data.images)


def empty_model(settings: Settings, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device: it has names and shapes, and takes no memory."""
    import torch

    if objective_of(settings.recipe.training).scores:
        from . import scores

        config = copy.deepcopy(config)
        config.num_labels = 1
        with torch.device("meta"):
            return scores.class_of(config)(config)
    with torch.device("meta"):
        trusts = settings.recipe.model.trust_remote_code
        return model_class(settings).from_config(config, trust_remote_code=trusts)


def largest_parameter(settings: Settings, config: PreTrainedConfig) -> int:
    """Return the number of elements of the model's largest parameter."""
    return max(parameter.numel() for parameter in empty_model(settings, config).parameters())


def parameter_count(model: torch.nn.Module, trained: bool = False) -> int:
    """Return the number of parameters of the whole model, or of those that are trained, as elements() counts them."""
    return sum(elements(parameter) for parameter in model.parameters() if parameter.requires_grad or not trained)


def elements(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of a whole parameter, even where this rank holds a shard (DeepSpeed's ds_numel, DTensor's
    numel) or 4-bit weights in containers (bitsandbytes' quant_state)."""
    quantised = getattr(parameter, "quant_state", None)
    return int(quantised.shape.numel() if quantised else getattr(parameter, "ds_numel", parameter.numel()))


def untaught(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return name -> module of what gets no gradient from the loss of texts: what texts do not reach, and indexers, which choose
    the tokens that a layer sees (DeepSeek-V3.2, V4 and GLM-5), for a choice has no gradient."""
    chooses = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == "indexer"}
    return beyond_texts(model) | chooses


def beyond_texts(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return name -> module of what texts do not reach in a model of images (or sounds) and texts: all but its decoder and its
    two ends. {} for a model of texts. Trained, they would get no gradient, which DDP takes for an error, and still decay."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.get_text_config() is base.config:
        return {}
    ends = (base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings())
    reached = {id(parameter) for part in ends if part is not None for parameter in part.parameters()}
    beyond: dict[str, torch.nn.Module] = {}
    for name, module in base.named_modules():  # a module before those in it
        own = {id(parameter) for parameter in module.parameters()}
        if own and own.isdisjoint(reached) and not any(name.startswith(f"{outer}.") for outer in beyond):
            beyond[name] = module
    return beyond
