"""Tokens of each expert of a mixture, counted where routers hand them on, under every strategy."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..data.collate import REAL, Inputs
from ..run.hooks import Feature
from ..upstream.experts import computes_gradients


class ExpertTokens(Feature):
    """Counts on the device, and only in training. Padding and filler do not count.

    experts: how many, by the names or numbers of layers
    tokens: of all these layers in one tensor: (experts of the first layer + ...); of_layers: each layer's part of it
    """

    def __init__(self, experts: Mapping[Any, int], device: torch.device) -> None:
        self.tokens = torch.zeros(sum(experts.values()), dtype=torch.long, device=device)
        self.of_layers = dict(zip(experts, self.tokens.split([*experts.values()]), strict=True))
        # Of this micro-batch: (rows, tokens), false for filler and padding; None between micro-batches, where others may count.
        self.real: torch.Tensor | None = None

    def watch(self, layer: object, experts: torch.nn.Module) -> None:
        """Count what a layer's experts get from here on."""
        experts.register_forward_pre_hook(partial(self._count, layer))

    def before_micro_batch(self, inputs: Inputs) -> None:
        self.real = inputs[REAL]

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        self.real = None

    def _count(self, layer: object, module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        """Count a layer's pass over each micro-batch, but not when it is computed again for its gradients (activation
        checkpointing): in a pipeline that may be after other micro-batches."""
        if self.real is None or not module.training or computes_gradients():
            return
        chosen = given[1].long()  # of each token its experts: (tokens, top_k)
        if self.real.numel() == len(chosen):
            counted = self.real.reshape(-1, 1).expand_as(chosen).long()
        else:  # a tile of a sequence (tiled_mlp)
            counted = torch.ones_like(chosen)
        self.of_layers[layer].scatter_add_(0, chosen.flatten(), counted.flatten())
