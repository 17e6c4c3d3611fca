"""Masks in which the tokens of an image see each other, where samples lie end to end.

Transformers 5.23 makes the mask of Gemma 3's and 4's layers with a sliding window from functions of positions. The one that knows
which image a token belongs to is given the token's position in its sample, not in the sequence (gemma3/modeling_gemma3.py:
create_masks_for_vision_model; masking_utils.py: remap_positions_for_packed_sequence). So behind the first sample tokens of an
image do not see those of the same image that follow them, and tokens of a text may see what follows them.
"""

import importlib
from typing import Any

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

    def __init__(self, plain: Any) -> None:
        self.plain, self.__module__ = plain, __name__

    def __call__(
        self,
        config: Any,
        inputs_embeds: Any,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Any,
        block_sequence_ids: Any,
    ) -> dict[str, Any]:
        from transformers import masking_utils as masks

        known = {"config": config, "inputs_embeds": inputs_embeds, "past_key_values": past_key_values}
        made: dict[str, Any] = self.plain(
            **known, attention_mask=attention_mask, position_ids=position_ids, block_sequence_ids=block_sequence_ids
        )
        end_to_end = attention_mask is None and past_key_values is None and position_ids is not None
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
