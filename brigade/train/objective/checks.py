"""Whether a run can compute its objective. Told before the model is built."""

from typing import Any

from ...errors import UserError
from ..recipe.objectives import ADAPTERS_OFF, ANSWERS, MODEL, objective_of, precomputes, reference_of
from ..run.directory import Run
from .load import loss_of


def check(run: Run, config: Any) -> None:
    """Raise UserError where the objective is none, or its reference cannot be had. config: of the model that is trained"""
    from ..loop import reference_model

    settings = run.settings
    training = settings.recipe.training
    if objective_of(training).rows == ANSWERS:
        return
    loss_of(training, settings.place("objective"))
    if training.sync_every:
        problem = f"replicas that train independently do not learn {objective_of(training).title}"
        raise UserError(settings.place("sync_every"), problem, "leave it out, or train with objective: sft")
    reference = reference_of(settings.recipe)
    if reference is None or reference == ADAPTERS_OFF or (reference == MODEL and precomputes(settings.recipe)):
        return
    reference_model.check(run, reference, config)
