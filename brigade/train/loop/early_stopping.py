"""Stop a run whose held-out loss no longer falls."""

import math
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ...errors.console import counted


class EarlyStopping(TrainerCallback, ExportableState):
    """Stops after `patience` evaluations in a row without a better held-out loss; the one before the first step is none.

    Checkpoints hold its count, so that a resumed run stops at the same step.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.forget()

    def forget(self) -> None:
        """Begin anew, as before the first evaluation."""
        self.best, self.without = math.inf, 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if not state.global_step or state.global_step >= state.max_steps:
            return
        better = metrics["eval_loss"] < self.best  # and NaN is not
        self.best, self.without = (metrics["eval_loss"], 0) if better else (self.best, self.without + 1)
        if self.without >= self.patience:
            control.should_training_stop = True
            if state.is_world_process_zero:
                tqdm.write(
                    f"Stopping at step {state.global_step} of {state.max_steps}: no held-out loss below "
                    f"{self.best:.4f} in {counted(self.without, 'evaluation')}."
                )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Also where a run resumes that had stopped, and died before its model was saved.
        control.should_training_stop = control.should_training_stop or self.without >= self.patience

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {"patience": self.patience}, "attributes": {"best": self.best, "without": self.without}}
