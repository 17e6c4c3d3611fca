"""A loss or a weight that is NaN or infinite ends the run: what is trained from there on is lost, and would be saved."""

import math
from collections.abc import Mapping
from typing import Any

from ..distributed import ranks
from ..errors import UserError
from ..model.base_weights import first_not_finite
from ..run.directory import Run, whole_checkpoints


def check_losses(logs: Mapping[str, Any], run: Run, step: int) -> None:
    """Raises UserError where a loss among these logged figures is not finite. Losses are means over all ranks, so all raise."""
    for key, value in logs.items():
        if (key == "loss" or key.endswith("_loss")) and not math.isfinite(value):
            name = "the loss" if key == "loss" else f"the held-out loss ({key})"
            raise _error(f"{name} is {value}", run, step)


def check_weights(model: Any, run: Run, step: int) -> None:
    """Raises UserError on all ranks where any of them holds a trained weight that is not finite. A collective.

    Call it before a checkpoint is written: the loss shows it only one step later.
    """
    found = next((name for name in ranks.gather(first_not_finite(model)) if name), None)
    if found:
        raise _error(f"the weight {found} is not finite", run, step)


def _error(what: str, run: Run, step: int) -> UserError:
    kept = whole_checkpoints(run.directory)
    newest = f"{kept[max(kept)]} is from before" if kept else "there is no checkpoint from before"
    precision = ", bf16 instead of fp16" if run.settings.recipe.training.fp16 else ""
    if step:
        cure = f"a lower learning_rate (it is {run.batch.learning_rate:g}), more warmup_steps{precision}; or look at the data"
    else:
        cure = "look at the weights that it begins with, and at its data"
    return UserError(f"step {step}", f"{what}: the run stops here, for it would not recover; {newest}", cure)
