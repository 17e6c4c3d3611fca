"""How long a run is, its warm-up, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...errors import UserError
from ...errors.console import counted
from .. import upstream
from ..data.sampling import GlobalBatches
from ..recipe.schedules import DECAY
from ..run.directory import Run

if TYPE_CHECKING:
    from ..engines.engine import Keywords


def run_length(run: Run, train_samples: int) -> float:
    """Optimizer steps of a run, in parts where it ends within an epoch."""
    training, batch = run.settings.recipe.training, run.batch
    if training.max_steps > 0:
        return training.max_steps
    return GlobalBatches(train_samples, batch.global_size, 1, 0, 1).steps * training.num_train_epochs


def warmup(run: Run, total: float) -> int:
    """Return the warm-up steps of a run of `total` steps. A share is of the steps that our batches make, not of Trainer's
    estimate."""
    wanted = run.settings.recipe.training.warmup_steps
    return round(wanted * total) if wanted < 1 else int(wanted)


def schedule_arguments(run: Run, total: float) -> Keywords:
    """Return Transformers' lr_scheduler_kwargs for a run of `total` steps, with each share turned into a number of steps."""
    training = run.settings.recipe.training
    arguments = dict(training.lr_scheduler_kwargs)
    if training.lr_scheduler_type == "warmup_stable_decay":
        decay = arguments.get("num_decay_steps", DECAY)
        arguments["num_decay_steps"] = max(1, round(decay * total)) if decay < 1 else int(decay)
    return arguments


def rate(run: Run, total: float, step: int) -> float:
    """The learning rate of the 1-based `step` of a run of so many steps."""
    import torch

    with upstream.quick_imports():
        from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=run.batch.learning_rate)
    name = run.settings.recipe.training.lr_scheduler_type
    schedule = get_scheduler(name, optimizer, warmup(run, total), math.ceil(total), schedule_arguments(run, total))
    return run.batch.learning_rate * schedule.lr_lambdas[0](step - 1)


def check_phases(run: Run, total: float) -> None:
    """Raise UserError where the phases of the schedule and the steps of the run do not fit each other."""
    settings, steps = run.settings, math.ceil(total)
    place, arguments = settings.place("lr_scheduler_kwargs"), schedule_arguments(run, total)
    decay = arguments.get("num_decay_steps")
    if decay:
        before = warmup(run, total)
        stable, ratio = arguments.get("num_stable_steps"), arguments.get("min_lr_ratio", 0)
        sum_of_phases = f"{before} steps of warm-up, {f'{stable} of stable, ' if stable else ''}{decay} of decay"
        if before + decay + (stable or 0) > steps:
            problem = f"{sum_of_phases}: that is more than the run's {counted(steps, 'step')}"
            raise UserError(place, problem, "give num_decay_steps as a share of all steps: {num_decay_steps: 0.1}")
        if stable is not None and before + decay + stable < steps and not ratio:
            problem = f"{sum_of_phases}: the learning rate of the steps after them, up to {steps}, would be 0"
            raise UserError(place, problem, "leave num_stable_steps out: it is what the other phases leave")
    try:
        for step in (1, warmup(run, total) + 1, steps + 1):  # Trainer asks for one more than it trains
            rate(run, total, step)
    except (TypeError, ValueError, ArithmeticError) as error:
        name = settings.recipe.training.lr_scheduler_type
        cure = "give it fewer warmup_steps, or take another schedule"
        raise UserError(settings.place("lr_scheduler_type"), f"{name} cannot be computed: {error}", cure) from None
