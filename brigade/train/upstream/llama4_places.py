"""Llama 4's layers without rotary embeddings count a token's place within its sample, and not within its row."""

from typing import Any

import torch

_POSITIONS = "query_positions"  # an argument by which a layer hands its position_ids on to its attention


class _Scale:
    """Scales the queries of one layer by their tokens' positions, as the layer's own code does by their places in the row.

    positions: int64 (rows, tokens), of the forward pass that runs
    """

    def __init__(self, attention: Any) -> None:
        self.floor, self.strength = attention.floor_scale, attention.attn_scale
        self.positions: torch.Tensor | None = None

    def look(self, _: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take over the positions: a pre-hook of the attention, which activation checkpointing runs again with the layer."""
        self.positions = given[_POSITIONS]
        return args, {key: value for key, value in given.items() if key != _POSITIONS}

    def __call__(self, _: Any, args: tuple[Any, ...], queries: torch.Tensor) -> torch.Tensor:
        """Return the scaled queries: a hook of the layer that makes them. queries: (rows, tokens, heads * head size)"""
        assert self.positions is not None
        steps = torch.floor((self.positions.float() + 1.0) / self.floor)
        return (queries * (torch.log1p(steps) * self.strength + 1.0)[..., None]).to(queries.dtype)


def _hand_on(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the attention the positions too: a pre-hook of a layer, which keeps them to itself."""
    return args, given | {_POSITIONS: given["position_ids"]}


def count_within_samples(model: Any) -> None:
    """Let Llama 4's layers scale a query by its token's position, in whatever row samples lie. Other models stay as they are.

    Transformers 5.23 counts tokens from the beginning of the row (llama4/modeling_llama4.py: Llama4TextAttention), so that a
    sample behind the first 8,192 tokens of a row (floor_scale) would be computed otherwise than by itself.
    model: with its adapters, if it gets some; it is changed in place
    """
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if type(attention).__name__ != "Llama4TextAttention" or attention.use_rope:
            continue
        if attention.attn_temperature_tuning:
            attention.attn_temperature_tuning = False
            scale = _Scale(attention)
            layer.register_forward_pre_hook(_hand_on, with_kwargs=True)
            attention.register_forward_pre_hook(scale.look, with_kwargs=True)
            attention.q_proj.register_forward_hook(scale)
