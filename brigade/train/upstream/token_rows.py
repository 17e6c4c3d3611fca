"""Rows of embeddings that are trained apart (PEFT's trainable_token_indices), on whole and on sharded weights.

PEFT (tuners/trainable_tokens/layer.py) copies the whole matrix in each forward pass, puts the trained rows into the copy,
and takes the gradient of all of it. Here the frozen matrix computes as ever, and only what belongs to those rows is replaced: the
same numbers without the copy, and only the frozen module reads a weight that ZeRO-3 or FSDP2 have sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from . import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return (name, module) of the layers with trained rows; a tied output layer is one of its own, with the embeddings' rows."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, TrainableTokensLayer)]


def rows_of_shards() -> AbstractContextManager[None]:
    """Let trained rows begin with those of the base where ZeRO-3 has sharded it: PEFT's own way asks for a GPU
    (_collect_token_weights)."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    return replaced(TrainableTokensLayer, _collect_token_weights=_gathered_rows)


def _gathered_rows(_: object, weight: torch.Tensor, rows: list[int], width: int) -> torch.Tensor:
    """Return some rows of a matrix, on every rank. width: of a row, which a sharded matrix does not tell"""
    import deepspeed

    with torch.no_grad(), deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().reshape(-1, width)[rows].clone()


def compute_by_rows(model: PreTrainedModel) -> None:
    """Let a model with adapters compute the trained rows of its ends beside the frozen matrices, in place."""
    from transformers.distributed.fsdp import is_fsdp_enabled
    from transformers.integrations import is_deepspeed_zero3_enabled

    inside = dict(layers(model))
    for name, layer in inside.items():
        layer.forward_adapters = _Rows(layer)
        # A copy with the trained rows would hide from Accelerate that two ends share a matrix (utils/fsdp_utils.py).
        model.get_submodule(name.rpartition(".")[0])._getattr_wrapped = _frozen_weight
        if is_deepspeed_zero3_enabled():  # which gathers them for this layer, though another module has them
            import deepspeed

            for rows in layer.trainable_tokens_delta.values():
                deepspeed.zero.register_external_parameter(layer, rows)
    if inside and is_fsdp_enabled():  # Accelerate ties them again by their names
        base = model.get_base_model()
        tied = [(_inside(base, one), _inside(base, other)) for one, other in base.all_tied_weights_keys.items()]
        base.tie_weights = functools.partial(_tie, base, tied)


def _tie(model: torch.nn.Module, tied: list[tuple[str, str]], *args: object, **options: object) -> None:
    """Stand in for Transformers' tie_weights(), which knows the names of a model without adapters only."""
    for one, other in tied:
        module, _, weight = one.rpartition(".")
        setattr(model.get_submodule(module), weight, model.get_parameter(other))


def _frozen_weight(_: str, modules: Mapping[str, torch.nn.Module]) -> torch.Tensor:
    return modules["token_adapter"].get_base_layer().weight


def _inside(model: torch.nn.Module, name: str) -> str:
    """Return the present name of a weight, which may lie in a layer with trained rows now."""
    module, _, weight = name.rpartition(".")
    deeper = f"{module}.token_adapter.base_layer"
    return f"{deeper}.{weight}" if deeper in dict(model.named_modules()) else name


class _Rows:
    """The forward_adapters method of a TrainableTokensLayer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer
        self.sorted: dict[str, torch.Tensor] = {}

    def __call__(
        self, inputs: torch.Tensor, active_adapters: list[str], *args: object, **options: object
    ) -> torch.Tensor:
        layer = self.layer
        result: torch.Tensor = layer.base_layer(inputs, *args, **options)
        if layer.disable_adapters or not active_adapters or layer.merged:
            return result
        (name,) = active_adapters
        delta, device = layer.trainable_tokens_delta[name].to(result.dtype), result.device
        if name not in self.sorted or self.sorted[name].device != device:
            self.sorted[name] = torch.tensor(layer.token_indices[name], device=device)
        tokens = self.sorted[name]
        if not isinstance(layer.base_layer, torch.nn.Embedding):
            return result.index_copy(-1, tokens, functional.linear(inputs, delta).to(result.dtype))
        scale = layer._get_embed_scale()
        if scale is not None:  # Gemma's embeddings
            delta = delta * scale.to(delta.dtype)
        places = torch.searchsorted(tokens, inputs).clamp_(max=len(tokens) - 1)
        is_trained = (tokens[places] == inputs).unsqueeze(-1)
        return torch.where(is_trained, functional.embedding(places, delta), result)
