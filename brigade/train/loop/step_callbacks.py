"""What every run corrects of a checkpoint's state, and adds to what is logged of a step."""

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

if TYPE_CHECKING:
    from .trainer import Trainer


class StepsDue(TrainerCallback):
    """Corrects what a checkpoint brings back of the run that wrote it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # the intervals of this run, not of that one
        control.should_log = control.should_evaluate = control.should_save = False  # it was done then

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= state.max_steps


class Figures(TrainerCallback):
    """Adds its figures to what is logged of a step, before another callback reads it."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:
            return
        logs.update(self.trainer.meter.report())
        logs["tokens"] = self.trainer.tokens_before + self.trainer.meter.tokens_of_all
        for feature in self.trainer.features:
            feature.add_figures(logs, state.global_step)
        state.log_history[-1].update(logs)
