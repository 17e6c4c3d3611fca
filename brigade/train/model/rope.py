"""Sequences longer than a model's positions: a recipe's rope_parameters, which stretch its rotary embedding by YaRN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...errors.tables import Document
from ..recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def positions_by(rope: Document | None, published: int | None) -> int | None:
    """Return the number of a model's positions with a recipe's rope_parameters; without them, the published one."""
    return int(rope["factor"] * rope["original_max_position_embeddings"]) if rope else published


def stretch(settings: Settings, config: PreTrainedConfig) -> PreTrainedConfig:
    """Put the recipe's rope_parameters into a model's configuration, which keeps its own base frequency (rope_theta).

    Raises UserError for a model with another kind of positions or with scaled ones already.
    """
    ours: Any = settings.recipe.model.rope_parameters or {}
    place = settings.place("rope_parameters")
    own = getattr(config, "rope_parameters", None) or {}
    already = all(own.get(key) == value for key, value in ours.items())  # as an earlier run saved it
    if "rope_theta" not in own or not (own.get("rope_type", "default") == "default" or already):
        problem = f"YaRN stretches plain rotary embeddings of one base, and {config.model_type} has {own or 'none'}"
        raise UserError(place, problem, "leave it out (--rope_parameters null)")
    config.rope_parameters = own | ours
    config.max_position_embeddings = positions_by(ours, None)
    return config
