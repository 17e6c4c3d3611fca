"""Find an objective's function: one of ours, or one of the user's."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import get_type_hints

import numpy as np
import torch

from ....errors import UserError
from ...recipe.objectives import beta_of, is_own, loss_type_of, objective_of
from ...recipe.program import own_function
from ...recipe.settings import Settings
from ...recipe.training_section import TrainingSection
from .. import loss_trial
from .contract import Loss, NoReference, Options, Pairs, Result

TRIED = 1000  # pairs


def options_of(training: TrainingSection) -> Options:
    """Return what the recipe says to losses."""
    decided = {"beta": beta_of(training), "loss_type": loss_type_of(training)}
    return Options(**{key: getattr(training, key) for key in get_type_hints(Options)} | decided)


def loss_of(settings: Settings) -> Loss:
    """Return the function of the recipe's objective.

    Raises UserError for a file or a function that is not there or not permitted, and for a function that does not keep the
    contract, as a trial shows.
    """
    training, place = settings.recipe.training, settings.place("objective")
    if not is_own(training.objective):
        loss: Loss = importlib.import_module(f"{__package__}.{training.objective}").loss
        return loss
    try:
        problem = _breaks_contract(lambda: own_function(settings, "objective"), training)
    except NoReference as error:
        cure = "name one: reference: model, adapters_off (with adapters), or a directory"
        raise UserError(place, f"{training.objective}: {error}", cure) from None
    if problem:
        cure = "return Result(losses, figures) with a value for each pair, made of that pair alone (docs/extending.md)"
        raise UserError(place, f"{training.objective}: {problem}", cure)
    return own_function(settings, "objective")  # type: ignore[no-any-return]


def _breaks_contract(load: Callable[[], Callable[[Pairs, Options], Result]], training: TrainingSection) -> str:
    """Return in which way a function of pairs is not an objective; "" where it is one. load: returns it, before its first call"""
    options, draws = options_of(training), np.random.default_rng(0)
    chosen_tokens, rejected_tokens = tokens = draws.integers(1, 200, (2, TRIED)).astype(float)
    chosen, rejected = answers = -tokens * draws.uniform(0.05, 4.0, tokens.shape)
    values = {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_tokens": chosen_tokens,
        "rejected_tokens": rejected_tokens,
    }
    if objective_of(training).reference:
        references = np.minimum(answers + draws.normal(0.0, 8.0, answers.shape), -0.01)
        values |= dict(zip(("reference_chosen", "reference_rejected"), references, strict=True))
    pairs = {
        name: torch.from_numpy(of_pairs).requires_grad_(name in ("chosen", "rejected"))
        for name, of_pairs in values.items()
    }

    def losses_and_figures(
        function: Callable[[Pairs, Options], Result], given: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        result = Result(*function(Pairs(**given), options))
        shown = {"losses": result.losses}
        for name, figure in result.figures.items():
            values, which = figure if isinstance(figure, tuple) else (figure, figure)
            shown |= {name: values, f"which of {name} count": which}
        return shown

    return loss_trial.why_not(lambda: partial(losses_and_figures, load()), pairs, "pair", (NoReference,))
