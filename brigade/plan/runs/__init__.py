"""Serve a run that trains: the micro-batch that fits, a device's peak, the comparison with the plan after ten steps, and what
would fit where memory was not enough."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...errors.tables import Fields
from ...train.host.cluster import World
from ...train.recipe.batch import Batch
from ...train.recipe.files import calibration_file
from ...train.recipe.schema import Recipe
from ...train.run.offers import CURE, Remedies
from ...train.strategy import Strategy
from .. import hardware
from ..choice import job_of_run
from ..choice.job_of_recipe import Count, counting, fastest_fit, largest_fit
from ..hardware import calibration
from ..shape.find import described

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, TrainerCallback

    from ...train.run.directory import Run
    from ...train.watch.throughput import Meter

T = TypeVar("T")


def leave_aside_a_broken_calibration(world: World) -> None:
    """Let a run go on without the user's own figures where their file cannot be used; each host says so once."""
    file = calibration_file()
    if file and file.exists():
        calibration.leave_aside_if_broken("" if world.local_rank else world.host)


def peak_tflops(device_name: str) -> float | None:
    """Return a device's dense bf16 peak by its driver's name for it; None for an unknown one."""
    device = hardware.gpu_of_device(device_name)
    return device.bf16_tflops if device else None


def callbacks(run: "Run", meter: "Meter", config: "PreTrainedConfig", trained: int) -> list["TrainerCallback"]:
    """Return the callback that compares a run with its plan (prediction.py)."""
    from .prediction import CompareWithPlan

    return [CompareWithPlan(run, meter, config, trained)]


def what_fits(run: "Run", config: "PreTrainedConfig", needed: float) -> Remedies:
    """Return what would make a run fit (remedies.py). config: the model's; needed: bytes that its GPU would have had to hold"""
    from . import remedies

    return remedies.what_fits(run, config, needed)


def fails_to_load(run: "Run", config: "PreTrainedConfig") -> tuple[str, str] | None:
    """Return why a run's model does not fit while it loads, and a cure (prediction.py); None where it does, or none can tell."""
    from . import prediction

    return prediction.fails_to_load(run, config)


def rows_that_fit(
    recipe: Recipe, strategy: Strategy, batch: Batch, replica: World, config: "PreTrainedConfig"
) -> tuple[int, str]:
    """Return (the largest micro-batch that fits this rank's GPU as the planner counts, why in words); 1 where it cannot tell."""
    found, why = _here(recipe, strategy, replica, config, partial(largest_fit, recipe, strategy, batch))
    return (1, f"{why}{CURE}") if found is None else found


def fastest_that_fits(
    recipe: Recipe,
    keys: tuple[str, ...],
    strategy: Strategy,
    batch: Batch,
    replica: World,
    config: "PreTrainedConfig",
) -> tuple[Fields, str]:
    """Return (the values of those keys with which this rank's GPU trains fastest as the planner counts, why in words); no values
    where it cannot tell."""
    found, why = _here(recipe, strategy, replica, config, partial(fastest_fit, recipe, keys, strategy, batch))
    return ({}, f"what takes the least memory, for {why}") if found is None else found


def _here(
    recipe: Recipe,
    strategy: Strategy,
    replica: World,
    config: "PreTrainedConfig",
    choose: Callable[[Count], tuple[T, str]],
) -> tuple[tuple[T, str] | None, str]:
    """Return (what `choose` says of this rank's GPU, ""), or (None, why nothing can be said of it)."""
    device = hardware.gpu_here()
    if device is None:
        return None, "there is no GPU"
    known, place = config.to_dict(), "the model's config"
    try:
        job_of_run.check_texts(recipe.data.images)
        found = choose(counting(strategy, replica.size, replica.local_size, known, device, place))
        job_of_run.check_kernels(described(known, place))
        return found, ""
    except job_of_run.NotCovered as error:
        return None, str(error)
    except Exception as error:  # a run that trains does not end for an estimate's sake
        return None, f"the formulas fail on it, {type(error).__name__}"
