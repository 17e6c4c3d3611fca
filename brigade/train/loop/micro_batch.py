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
        found = _largest_micro_batch(run, config, liger)
    return batch_arithmetic(training, run.batch.data_parallel_size, run.settings.place("global_batch_size"), *found)


def _largest_micro_batch(run: Run, config: Any, liger: bool) -> tuple[int, str]:
    """(the largest micro-batch that fits this rank's GPU as the planner counts, in words why); 1 where it cannot tell."""
    import torch

    cure = "; set per_device_train_batch_size"
    if not torch.cuda.is_available():
        return 1, f"no GPU that the planner knows{cure}"
    from ...plan import hardware
    from ...plan.choice import job_of_run

    device = hardware.gpu_of_device(name := torch.cuda.get_device_name())
    if device is None:
        return 1, f"no figures of {name}{cure}"
    recipe, sizes = recipe_here(run.settings, liger), (run.replica.size, run.replica.local_size)
    try:
        return job_of_run.largest_fit(
            recipe, run.strategy, run.batch, *sizes, config.to_dict(), device, "the model's config"
        )
    except job_of_run.NotCovered as error:
        return 1, f"{error}{cure}"
    except Exception as error:  # a run that trains does not end for an estimate's sake
        return 1, f"the formulas fail on it, {type(error).__name__}{cure}"
