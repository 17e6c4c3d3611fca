"""Find an objective's function: one of ours, or one of the user's."""

import importlib
from typing import Any

import torch

from ...errors import UserError, first_line
from ..program import own_function
from ..recipe.objectives import beta_of, is_own, loss_type_of, objective_of
from ..recipe.training_section import TrainingSection
from .contract import Loss, NoReference, Options, Pairs, Result


def options_of(training: TrainingSection) -> Options:
    """Return what the recipe says to losses."""
    return Options(
        beta_of(training),
        loss_type_of(training),
        training.label_smoothing,
        training.simpo_gamma,
        training.desirable_weight,
        training.undesirable_weight,
    )


def loss_of(training: TrainingSection, place: str) -> Loss:
    """Return the function of the recipe's objective.

    place: where it is named. Raises UserError for a file or a function that is not there, and for a function that does not keep
    the contract: it is tried with two pairs.
    """
    if not is_own(training.objective):
        loss: Loss = importlib.import_module(f"{__package__}.{training.objective}").loss
        return loss
    function = own_function(training.objective, place)
    try:
        problem = _breaks_contract(function, training)
    except NoReference as error:
        cure = "name one: reference: model, adapters_off (with adapters), or a directory"
        raise UserError(place, f"{training.objective}: {error}", cure) from None
    if problem:
        cure = "return Result(losses, figures) of tensors with a value for each pair (docs/preferences.md)"
        raise UserError(place, f"{training.objective}: {problem}", cure)
    return function  # type: ignore[no-any-return]


def _breaks_contract(function: Any, training: TrainingSection) -> str:
    """Return in which way a function of two pairs is no objective; "" where it is one."""
    answers = torch.tensor([[-3.0, -4.0], [-5.0, -2.0]], dtype=torch.float64, requires_grad=True)
    references = torch.tensor([[-3.5, -3.0], [-4.0, -2.5]], dtype=torch.float64)
    tokens = torch.tensor([[3.0, 2.0], [4.0, 2.0]], dtype=torch.float64)
    pairs = Pairs(*answers, *tokens, *(references if objective_of(training).reference else ()))
    try:
        result = function(pairs, options_of(training))
        losses, figures = Result(*result)
        shapes = {"losses": losses.shape} | {name: _values(figure).shape for name, figure in figures.items()}
    except NoReference:
        raise
    except Exception as error:
        return f"tried with two pairs, it raises {type(error).__name__}: {first_line(error)}"
    if other := next((name for name, shape in shapes.items() if shape != (2,)), None):
        return f"of two pairs, {other} has the shape {tuple(shapes[other])}"
    if not losses.requires_grad:
        return "its losses have no gradient"
    return ""


def _values(figure: Any) -> torch.Tensor:
    values: torch.Tensor = figure[0] if isinstance(figure, tuple) else figure
    return values
