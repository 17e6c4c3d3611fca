"""The loss that a model computes itself: by tiles, by token or with further terms, where the recipe asks for one."""

from typing import TYPE_CHECKING

from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import supervised_loss, tiled, token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply(model: "PreTrainedModel", settings: Settings) -> None:
    """Let a model compute the loss of a recipe. Call it before adapters and engines wrap the model."""
    training, objective = settings.recipe.training, objective_of(settings.recipe.training)
    by_token = objective.compares and not objective.scores
    terms = supervised_loss.Terms.of(settings)
    if by_token:
        token_losses.apply(model)
    elif terms != supervised_loss.PLAIN or settings.recipe.data.weighs_samples:
        supervised_loss.apply(model, terms)
    if training.tiled_loss or training.tiled_mlp:
        tiled.apply(model, training.tiled_loss, training.tiled_mlp, by_token, terms)
