"""The best checkpoint and stopping early: what they need of a recipe, and what a run says of them at its end.

This module imports no torch.
"""

from typing import TYPE_CHECKING

from ...errors import UserError
from ...errors.console import counted
from ..recipe.objectives import HELD_OUT, to_minimise
from ..recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import TrainerState


def check(settings: Settings) -> None:
    """Raise UserError when evaluations and checkpoints do not meet, for a recipe that needs both."""
    training = settings.recipe.training
    keys = ("load_best_model_at_end", "early_stopping_patience")
    key = next((key for key in keys if getattr(training, key)), None)
    if key is None:
        return
    place, evaluated, saved = settings.place(key), training.eval_steps, training.save_steps
    if not evaluated:
        raise UserError(place, f"{key} needs evaluations, but eval_steps is null", "set eval_steps")
    if key == "load_best_model_at_end" and not saved:
        raise UserError(place, f"{key} needs checkpoints, but save_steps is null", "set save_steps")
    if saved and saved != "auto" and saved % evaluated:
        problem = f"{key} needs the held-out loss of every checkpoint, but save_steps {saved} is no multiple of "
        cure = f"set save_steps to {-(-saved // evaluated) * evaluated}"
        raise UserError(settings.place("save_steps"), f"{problem}eval_steps {evaluated}", cure)


def saved_step(settings: Settings, state: "TrainerState") -> int:
    """The step of the model that a finished run saves: the last, or the best checkpoint's."""
    best = settings.recipe.training.load_best_model_at_end and state.best_model_checkpoint
    return state.best_global_step if best else state.global_step


def closing_lines(settings: Settings, state: "TrainerState", before: float | None, after: float) -> list[str]:
    """Sentences for the end of a run: `before` and `after` are held-out losses, of the first model and the saved one."""
    lines = []
    if settings.recipe.training.early_stopping_patience and state.global_step < state.max_steps:
        lines.append(f"Stopped early at step {state.global_step} of {state.max_steps}.")
    if state.best_model_checkpoint:
        metric = settings.recipe.training.metric_for_best_model
        where = f"at step {state.best_global_step}: {state.best_model_checkpoint}"
        lines.append(f"Best held-out {HELD_OUT[metric]} of a checkpoint: {state.best_metric:.4f} {where}.")
        # Evaluations whose model was not saved cannot be gone back to, but a curve's best point is one of them, too.
        evaluations = (entry for entry in state.log_history if metric in entry)
        _, step, figure = min((to_minimise(metric, entry), entry["step"], entry[metric]) for entry in evaluations)
        if to_minimise(metric, {metric: figure}) < to_minimise(metric, {metric: state.best_metric}):
            cure = "with save_steps equal to eval_steps it would be"
            lines.append(f"Step {step} had {figure:.4f}, and was not saved: {cure}.")
    first = f"{before:.4f} before, " if before else ""
    lines.append(f"Held-out loss {first}{after:.4f} after {counted(saved_step(settings, state), 'step')}.")
    if before is not None and after > before:
        cure = "try a lower learning_rate or fewer steps, and compare the two data sets"
        lines.append(f"Training made the held-out loss worse: {cure}.")
    return lines
