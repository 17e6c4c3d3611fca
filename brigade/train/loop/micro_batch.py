"""The micro-batch where the recipe says `auto`: the largest that fits this host's GPU."""

import re
from typing import Any

from ..recipe.batch import Batch, batch_arithmetic
from ..recipe.files import read_yaml
from ..recipe.flags import Settings
from ..recipe.schema import Recipe
from ..run.directory import RECORD, Run


def recipe_here(settings: Settings, liger: bool) -> Recipe:
    """The recipe with the kernels that this host has."""
    training = settings.recipe.training.model_copy(update={"use_liger_kernel": liger})
    return settings.recipe.model_copy(update={"training": training})


def batch_here(run: Run, config: Any, liger: bool) -> Batch:
    """The run's batch with this rank's micro-batch: what the run began with, where it continues, or the planner's."""
    training = run.settings.recipe.training
    record = run.directory / RECORD
    old = (read_yaml(record).get("run") or {}) if record.exists() and not run.settings.fresh else {}
    began = re.search(r"micro-batch (\d+)", str(old.get("batch")))
    share = run.batch.micro * run.batch.accumulation
    if began and int(began[1]) > 0 and share % int(began[1]) == 0:
        found = int(began[1]), "as this run began"
    else:
        found = run.offers.rows_that_fit(run, recipe_here(run.settings, liger), config)
    return batch_arithmetic(training, run.batch.data_parallel_size, run.settings.place("global_batch_size"), *found)
