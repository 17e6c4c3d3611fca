"""Serve a run before it trains: the micro-batch that fits, what it leaves to the GPU's memory, and a device's peak."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...errors.tables import Fields
from ...train.host.cluster import World
from ...train.recipe.batch import Batch
from ...train.recipe.schema import Recipe
from ...train.run.offers import CURE
from ...train.strategy import Strategy
from .. import hardware
from ..choice import job_of_run
from ..choice.job_of_recipe import Count, counting, fastest_fit, largest_fit
from ..shape.find import described

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")


def peak_tflops(device_name: str) -> float | None:
    """Return a device's dense bf16 peak by its driver's name for it; None for an unknown one."""
    device = hardware.gpu_of_device(device_name)
    return device.bf16_tflops if device else None


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
