"""Whether a model's sequences can be divided over ranks, before it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ....errors import UserError
from ...model import attention, packed_samples, parts, trial
from ...recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_APART = "apart"  # the attention by which no token sees another


def check(
    settings: Settings,
    config: PreTrainedConfig,
    attention_and_why: tuple[str, str],
    size: int,
    place: str,
    tensor: int = 1,
    ranks: int = 0,
) -> None:
    """Raise UserError where the sequences of the model of this config cannot be divided over `size` ranks.

    attention_and_why: of attention.choose()
    place: where the size is set; tensor: ranks that divide the heads already; ranks: how many another size has to divide, 0 for
    any
    """
    if not settings.recipe.training.padding_free:
        problem = "padded sequences are not divided over ranks: sequence parallelism wants them end to end"
        raise UserError(settings.place("padding_free"), problem, "leave the key out, or set it to true")
    name, where = type(config).__name__, settings.place("attn_implementation")
    chosen, why = attention_and_why
    if chosen not in attention.NEEDS_CUMULATIVE_LENGTHS:
        reason = f" ({why})" if why else ""
        problem = f"{chosen}{reason} would need a mask of whole sequences, which no rank has under sequence parallelism"
        cure = (
            f"use {' or '.join(attention.NEEDS_CUMULATIVE_LENGTHS)}"
            if not why
            else "use another model, or FSDP2 by itself"
        )
        raise UserError(where if not why else place, problem, cure)
    heads = config.get_text_config().num_attention_heads
    if heads % (size * tensor):
        fit = [str(n) for n in range(2, heads + 1) if heads % (n * tensor) == 0 and ranks % n == 0]
        of = f"{size} x {tensor}" if tensor > 1 else f"{size}"
        problem = (
            f"{heads} attention heads of {name} cannot be divided over {of} ranks: Ulysses gives each rank whole heads"
        )
        cure = f"set it to {' or '.join(fit)}" if fit else "remove the key: no size divides both heads and ranks"
        raise UserError(place, problem, cure)
    way, why = packed_samples.method_of(config, chosen, settings.recipe.model.trust_remote_code)
    if way == packed_samples.LENGTHS:
        why = _depend_on_others(settings, config)
    if why:
        raise UserError(
            place,
            f"sequences of {name} cannot be divided over ranks: {why}",
            "remove the key: use FSDP2 or ZeRO-3 without it",
        )


def _depend_on_others(settings: Settings, config: PreTrainedConfig) -> str:
    """Return why a part of a sequence cannot be computed by itself, attention aside; "" where it can.

    It is tried with a tiny random model, as in model/packed_samples.py: where each token attends only to itself, a part that is
    told its positions has to get the logits that the whole sequence gets.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def apart(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (value * query.sum(-1, keepdim=True)).transpose(1, 2), None  # a query knows its position

    ALL_ATTENTION_FUNCTIONS.register(_APART, apart)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(_APART, lambda *_, **__: None)
    images = settings.recipe.data.images
    own = config if images else config.get_text_config()
    sequence, places = torch.arange(7, 15)[None], torch.arange(8)[None]
    rows = parts.position_rows(config) if images else 1
    if rows > 1:
        places = places.expand(rows, *places.shape)
    options: dict[str, Any] = {
        "attn_implementation": _APART,
        "trust_remote_code": settings.recipe.model.trust_remote_code,
    }

    def ask() -> str:
        model = trial.tiny_model(own, images, **options)
        with torch.inference_mode():
            whole, part = (
                model(sequence[:, begin:], position_ids=places[..., begin:], use_cache=False).logits[:, -4:]
                for begin in (0, 4)
            )
        # Experts take their tokens in groups: which tokens are beside one changes how its products are rounded.
        alike = (whole - part).abs().max() <= 1e-4 * whole.abs().max()
        return "" if alike else "its layers look at other tokens than by attention, or count positions by themselves"

    return trial.why_not(ask, "a part of a sequence could not be tried by itself")
