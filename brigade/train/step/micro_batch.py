"""The micro-batch where the recipe says `auto`: the largest that fits the GPUs of this run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed import ranks
from ..host.cluster import World
from ..recipe.batch import Batch, batch_arithmetic
from ..recipe.files import read_yaml
from ..recipe.settings import Settings
from ..run.directory import RECORD, Kernels
from ..run.offers import Offers
from ..strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def settle_batch(
    batch: Batch,
    settings: Settings,
    strategy: Strategy,
    world: World,
    kernels: Kernels,
    config: PreTrainedConfig,
    directory: Path,
    offers: Offers,
) -> Batch:
    """Return the batch with the micro-batch that all ranks use: the recipe's; or the one that the run in `directory` began with;
    or the smallest of those that fit each rank's device, by the planner's count. A collective."""
    training, own = settings.recipe.training, batch
    with ranks.agreed(world):  # whatever this host's recipe says: that all have the same one is compared later
        if training.per_device_train_batch_size == "auto":
            fits = _began_with(directory, batch) if not settings.fresh else None
            if fits is None:
                recipe = settings.with_training(use_liger_kernel=kernels.use_liger_kernel).recipe
                fits = offers.rows_that_fit(recipe, strategy, batch, world.part(strategy.replicas), config)
            own = batch_arithmetic(training, batch.data_parallel_size, settings.place("global_batch_size"), *fits)
    batches = [Batch(**values) for values in ranks.gather(vars(own))]
    return min(batches, key=lambda batch: batch.micro)  # GPUs may differ


def _began_with(directory: Path, batch: Batch) -> tuple[int, str] | None:
    """Return (the micro-batch with which the run in a directory began, why it is used again); None where it does not divide a
    rank's share of the batch, or no run has begun there."""
    record = directory / RECORD
    if not record.exists():
        return None
    began = re.search(r"micro-batch (\d+)", str((read_yaml(record).get("run") or {}).get("batch")))
    share = batch.micro * batch.accumulation
    divides = began and int(began[1]) > 0 and share % int(began[1]) == 0
    return (int(began[1]), "as this run began") if began and divides else None
