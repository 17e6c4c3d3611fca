"""Stop a run whose held-out loss no longer falls, or whose held-out accuracy no longer rises."""

import math

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from ...errors.console import counted
from ..recipe.objectives import ACCURACY, to_minimise


class EarlyStopping(TrainerCallback, ExportableState):
    """Stops after `patience` evaluations in a row without a better held-out figure; the one before the first step is none.

    metric: the figure, as metric_for_best_model names it
    Checkpoints hold its count, so that a resumed run stops at the same step.
    """

    def __init__(self, patience: int, metric: str = "eval_loss") -> None:
        self.patience, self.metric = patience, metric
        self.forget()

    def forget(self) -> None:
        """Begin anew, as before the first evaluation."""
        self.best, self.without = math.inf, 0

    def on_evaluate(
        self, args: object, state: TrainerState, control: TrainerControl, metrics: dict[str, float], **_: object
    ) -> None:
        if not state.global_step or state.global_step >= state.max_steps:
            return
        figure = to_minimise(self.metric, metrics)
        better = figure < self.best  # and NaN is not
        self.best, self.without = (figure, 0) if better else (self.best, self.without + 1)
        if self.without >= self.patience:
            control.should_training_stop = True
            if state.is_world_process_zero:
                than = f"loss below {self.best:.4f}"
                if self.metric == ACCURACY:
                    than = f"accuracy above {-self.best:.4f}"
                tqdm.write(
                    f"Stopping at step {state.global_step} of {state.max_steps}: no held-out {than} "
                    f"in {counted(self.without, 'evaluation')}."
                )

    def on_epoch_begin(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        # Also where a run resumes that had stopped, and died before its model was saved.
        control.should_training_stop = control.should_training_stop or self.without >= self.patience

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps."""
        return {
            "args": {"patience": self.patience, "metric": self.metric},
            "attributes": {"best": self.best, "without": self.without},
        }
