"""Transformers' learning-rate schedules, and the arguments that each takes. This module imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...errors import UserError, did_you_mean, shown
from .training_section import TrainingSection

PLACE_OF = Callable[[str], str]  # settings.Settings.place: where a key of the recipe stands, for a message


@dataclass(frozen=True)
class Argument:
    """What the value of an argument has to be. wanted: in words; fits: tells whether a value is that"""

    wanted: str
    fits: Callable[[Any], bool]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_whole(value: object) -> bool:
    return _is_number(value) and value == int(value)


def _one_of(*names: str) -> Argument:
    return Argument(f"one of {', '.join(names)}", lambda value: value in names)


RATE = Argument("a number from 0", lambda value: _is_number(value) and value >= 0)
SHARE = Argument("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
POSITIVE = Argument("a number above 0", lambda value: _is_number(value) and value > 0)
COUNT = Argument("a whole number from 1", lambda value: _is_whole(value) and value >= 1)
STEPS = Argument("a whole number from 0", lambda value: _is_whole(value) and value >= 0)
STEPS_OR_SHARE = Argument(
    "a number of steps, or below 1 a share of all steps",
    lambda value: _is_number(value) and value > 0 and (value < 1 or _is_whole(value)),
)
_SHAPES = _one_of("linear", "cosine", "1-sqrt")
_MINIMUM = {"num_cycles": POSITIVE, "min_lr": RATE, "min_lr_rate": SHARE}

# lr_scheduler_type -> its arguments. A schedule that has those of EITHER needs exactly one of them.
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "linear": {},
    "cosine": {"num_cycles": POSITIVE},
    "cosine_with_restarts": {"num_cycles": COUNT},
    "cosine_with_min_lr": _MINIMUM,
    "cosine_warmup_with_min_lr": _MINIMUM | {"warmup_lr_rate": SHARE},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": COUNT},
    "polynomial": {"lr_end": RATE, "power": POSITIVE},
    "warmup_stable_decay": {
        "num_decay_steps": STEPS_OR_SHARE,
        "num_stable_steps": STEPS,
        "warmup_type": _SHAPES,
        "decay_type": _SHAPES,
        "min_lr_ratio": SHARE,
        "num_cycles": POSITIVE,
    },
}
EITHER = ("min_lr", "min_lr_rate")
AT_THE_END = ("lr_end", "min_lr")  # learning rates at which a schedule ends
DECAY = 0.1  # share of all steps, where warmup_stable_decay has no num_decay_steps (arXiv 2404.06395, section 4)


def check_schedule(training: TrainingSection, place: PLACE_OF) -> None:
    """Raise UserError for an argument that the schedule does not take, or lacks, and for a value that it cannot use."""
    name, given = training.lr_scheduler_type, training.lr_scheduler_kwargs
    known = ARGUMENTS[name]
    for key, value in given.items():
        if key not in known:
            raise UserError(place("lr_scheduler_kwargs"), f"{name} takes no argument {key!r}", _cure(name, key))
        if not known[key].fits(value):
            problem = f"{key} is {shown(value)}, not {known[key].wanted}"
            raise UserError(place("lr_scheduler_kwargs"), problem, f"give {known[key].wanted}")
    if EITHER[0] in known and len(given.keys() & {*EITHER}) != 1:
        problem = f"{name} takes either {' or '.join(EITHER)}, and it has {'both' if EITHER[0] in given else 'neither'}"
        cure = "say how far the learning rate falls: {min_lr_rate: 0.1} for a tenth of learning_rate"
        raise UserError(place("lr_scheduler_kwargs"), problem, cure)
    if training.optim == "schedule_free_adamw":
        _check_schedule_free(training, place)
    if name == "constant" and training.warmup_steps:
        problem = f"constant has no warm-up, and warmup_steps is {training.warmup_steps:g}"
        raise UserError(place("lr_scheduler_type"), problem, "take constant_with_warmup, or leave warmup_steps out")


def _check_schedule_free(training: TrainingSection, place: PLACE_OF) -> None:
    """Raise UserError for a schedule that falls, or without the momentum by which the weights are averaged."""
    if not training.lr_scheduler_type.startswith("constant"):
        problem = (
            f"schedule_free_adamw averages weights in the place of a schedule, and {training.lr_scheduler_type} is one"
        )
        cure = "take constant_with_warmup, or constant without warmup_steps; or optim adamw_torch_fused"
        raise UserError(place("lr_scheduler_type"), problem, cure)
    if not training.adam_beta1:
        problem = "schedule_free_adamw computes gradients between the average and the newest weights by it, and it is 0"
        raise UserError(place("adam_beta1"), problem, "give a number above 0: 0.9 is usual")


def check_last_rate(training: TrainingSection, learning_rate: float, place: PLACE_OF) -> None:
    """Raise UserError for a schedule that would end at the run's learning rate or above it."""
    for key in AT_THE_END:
        last = training.lr_scheduler_kwargs.get(key, 0)
        if last >= learning_rate:
            problem = f"{key} is {last:g}, and the learning rate that falls to it is {learning_rate:g}"
            raise UserError(place("lr_scheduler_kwargs"), problem, f"give a {key} below {learning_rate:g}")


def _cure(name: str, key: str) -> str:
    """What to write instead of an argument that the schedule `name` does not have."""
    others = [other for other, arguments in ARGUMENTS.items() if key in arguments]
    related = [other for other in others if other.startswith(name)] or others
    if related:
        return f"take lr_scheduler_type {' or '.join(related)}, or leave {key} out"
    if not ARGUMENTS[name]:
        return f"leave it out: {name} takes no arguments"
    return did_you_mean(key, ARGUMENTS[name])
