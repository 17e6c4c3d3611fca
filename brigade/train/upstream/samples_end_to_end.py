"""What Transformers counts by places in a row where samples lie end to end: Llama 4's attention, and masks of images."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


# ---- Llama 4's places -----------------------------------------------------------------------------------------------
# Llama 4's layers without rotary embeddings count a token's place within its sample, and not within its row.
_POSITIONS = "query_positions"  # an argument by which a layer hands its position_ids on to its attention


class _Scale:
    """Scales the queries of one layer by their tokens' positions, as the layer's own code does by their places in the row.

    positions: int64 (rows, tokens), of the forward pass that runs
    """

    def __init__(self, attention: torch.nn.Module) -> None:
        self.floor, self.strength = attention.floor_scale, attention.attn_scale
        self.positions: torch.Tensor | None = None

    def look(
        self, _: object, args: tuple[object, ...], given: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Take over the positions: a pre-hook of the attention, which activation checkpointing runs again with the layer."""
        self.positions = given[_POSITIONS]
        return args, {key: value for key, value in given.items() if key != _POSITIONS}

    def __call__(self, _: object, args: tuple[object, ...], queries: torch.Tensor) -> torch.Tensor:
        """Return the scaled queries: a hook of the layer that makes them. queries: (rows, tokens, heads * head size)"""
        assert self.positions is not None
        steps = torch.floor((self.positions.float() + 1.0) / self.floor)
        return (queries * (torch.log1p(steps) * self.strength + 1.0)[..., None]).to(queries.dtype)


def _hand_on(
    _: object, args: tuple[object, ...], given: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Give the attention the positions too: a pre-hook of a layer, which keeps them to itself."""
    return args, given | {_POSITIONS: given["position_ids"]}


def count_within_samples(model: torch.nn.Module) -> None:
    """Let Llama 4's layers scale a query by its token's position, in whatever row samples lie. Other models stay as they are.

    Transformers counts tokens from the beginning of the row (llama4/modeling_llama4.py: Llama4TextAttention), so that a
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


# ---- masks of images ------------------------------------------------------------------------------------------------
# Masks in which the tokens of an image see each other, where samples lie end to end.
#
# Transformers makes the mask of Gemma 3's and 4's layers with a sliding window from functions of positions. The one that
# knows which image a token belongs to is given the token's position in its sample, not in the sequence
# (gemma3/modeling_gemma3.py: create_masks_for_vision_model; masking_utils.py: remap_positions_for_packed_sequence). So behind
# the first sample tokens of an image do not see those of the same image that follow them, and tokens of a text may see what
# follows them.
MODULES = ("gemma3.modeling_gemma3", "gemma4.modeling_gemma4")
NAME = "create_masks_for_vision_model"


def correct_masks() -> None:
    """Replace the function that makes these masks, in each module that has one. Call it before a model with them trains."""
    for name in MODULES:
        module = importlib.import_module(f"transformers.models.{name}")
        plain = getattr(module, NAME)
        if plain.__module__ == module.__name__:  # once
            setattr(module, NAME, _Corrected(plain))


class _Corrected:
    """What makes masks for each kind of layer; only where samples lie end to end it is not as before."""

    def __init__(self, plain: Callable[..., dict[str, torch.Tensor | None]]) -> None:
        self.plain, self.__module__ = plain, __name__

    def __call__(
        self,
        config: PreTrainedConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        block_sequence_ids: torch.Tensor,
        **cache: Cache | None,
    ) -> dict[str, torch.Tensor | None]:
        """Return a mask for each kind of layer. cache: by Transformers' own name for it, which differs between its releases"""
        from transformers import masking_utils as masks

        known = {"config": config, "inputs_embeds": inputs_embeds, **cache}
        made = self.plain(
            **known, attention_mask=attention_mask, position_ids=position_ids, block_sequence_ids=block_sequence_ids
        )
        end_to_end = attention_mask is None and not any(cache.values()) and position_ids is not None
        samples = masks.find_packed_sequence_indices(position_ids) if end_to_end else None
        if samples is not None:
            # Without position ids all functions get positions in the sequence, between which distances are the same.
            near = masks.sliding_window_overlay(config.sliding_window)
            made["sliding_attention"] = masks.create_causal_mask(
                **known,
                attention_mask=None,
                position_ids=None,
                or_mask_function=masks.blockwise_overlay(block_sequence_ids),
                and_mask_function=masks.and_masks(near, masks.packed_sequence_mask_function(samples)),
            )
        return made
