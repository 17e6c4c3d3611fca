"""How long a run is, its warm-up, and whether a finished one can be lengthened."""

import json
import math
from pathlib import Path

from ..data.sampling import GlobalBatches
from ..errors import UserError
from ..errors.console import counted
from ..recipe.batch import length
from ..recipe.files import DEFAULT_RECIPE
from ..run.directory import RECORD, SUCCESS, Run


def run_length(run: Run, train_samples: int) -> float:
    """Optimizer steps of a run, in parts where it ends within an epoch."""
    training, batch = run.settings.recipe.training, run.batch
    if training.max_steps > 0:
        return training.max_steps
    return GlobalBatches(train_samples, batch.global_size, 1, 0, 1).steps * training.num_train_epochs


def warmup(run: Run, total: float) -> int:
    """Steps of warm-up of a run of so many steps: a share is of those that our batches make, not of Trainer's estimate."""
    wanted = run.settings.recipe.training.warmup_steps
    return round(wanted * total) if wanted < 1 else int(wanted)


def _rate(run: Run, steps: float, step: int) -> float:
    """The learning rate of the 1-based `step` of a run of so many steps."""
    import torch
    from transformers import get_scheduler

    training, total = run.settings.recipe.training, math.ceil(steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=run.batch.learning_rate)
    how = training.lr_scheduler_type, optimizer, warmup(run, steps), total, training.lr_scheduler_kwargs
    return run.batch.learning_rate * get_scheduler(*how).lr_lambdas[0](step - 1)


def check_steps(run: Run, train_samples: int, checkpoint: Path | None) -> None:
    """Raises UserError where the learning rate would never be reached, or where a run of another length than the one that
    wrote the checkpoint cannot go on from it. Says in run.lengthened what the learning rate does where it can.

    A run can be lengthened at its end: its order of samples does not depend on its length, but its learning rate may, and
    midway a run of no length would have had the rates of two.
    """
    settings, real = run.settings, run_length(run, train_samples)
    training, steps = settings.recipe.training, math.ceil(real)
    place = settings.place(length(training.model_dump())[0])
    # A trial of the recipe that nobody had to name, and the repetition of a run, go on as they are: the table says it.
    known = settings.recipe_path.name == RECORD or settings.recipe_path.resolve() == DEFAULT_RECIPE
    if training.warmup_steps > steps and not (known and "warmup_steps" not in settings.sources):
        problem = f"warmup_steps is {training.warmup_steps:g}, but the run has {counted(steps, 'step')} ({place}): "
        problem += "it would never reach learning_rate"
        cure = f"for a short trial --warmup_steps 0; else {steps} at most, or a share of all steps, e.g. 0.05"
        raise UserError(settings.place("warmup_steps"), problem, cure)
    if training.sync_every:
        from ..strategy.replicas import check_length

        check_length(settings, steps, GlobalBatches(train_samples, run.batch.global_size, 1, 0, 1).steps)
    further = (
        f"train its model further as a run of its own: --model_name_or_path {run.directory} and another --output_dir"
    )
    success = run.resized and (run.directory / SUCCESS).exists()
    if success and checkpoint is None:
        raise UserError(
            str(run.directory), "the finished run kept no checkpoint (save_steps), so it cannot be lengthened", further
        )
    if checkpoint is None:
        return
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    done, before = state["global_step"], state["max_steps"]
    if steps == before:
        return
    if done < before:
        problem = f"{checkpoint.name} is at step {done} of {before}, and only a run that had all its steps can be given {steps}"
        cure = (
            further if success else f"let it end first, with the {before} steps that its run.yaml has; then lengthen it"
        )
        raise UserError(place, problem, cure)
    if steps <= done:
        cure = f"a number above {done} lengthens it; for a shorter run give another --output_dir"
        raise UserError(place, f"it asks for {steps} steps, and the run in {run.directory} has {done} already", cure)
    if not any(_rate(run, real, step) for step in range(done + 1, steps + 1)):
        cure = f"{further}, with a schedule of its own"
        raise UserError(settings.place("lr_scheduler_type"), f"from step {done} on its learning rate is 0", cure)
    old, new = _rate(run, before, done), _rate(run, real, done + 1)
    run.lengthened = (
        f"from {before} to {steps} steps; the learning rate is from here on that of {training.lr_scheduler_type} over {steps} "
        f"steps: {new:.3g} at step {done + 1}, after {old:.3g} at step {done}"
    )
