"""What every run corrects of what a checkpoint brings back, and adds to what is logged of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import transformers
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from ..checkpoint import compatibility
from ..run.hooks import Feature
from .context import TrainingContext


class StepsDue(TrainerCallback):
    """Corrects what a checkpoint brings back of the run that wrote it."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        state.compute_steps(args, state.max_steps)  # the intervals of this run, not of that one
        control.should_log = control.should_evaluate = control.should_save = False  # it was done then

    def on_epoch_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= state.max_steps


class Figures(TrainerCallback):
    """Adds its figures to what is logged of a step, before another callback reads it."""

    def __init__(self, trainer: TrainingContext) -> None:
        self.trainer = trainer

    def on_log(self, args: object, state: TrainerState, control: object, logs: dict[str, float], **_: object) -> None:
        if "loss" not in logs:
            return
        logs.update(self.trainer.meter.report())
        logs["tokens"] = self.trainer.meter.tokens_before + self.trainer.meter.tokens_of_all
        for feature in self.trainer.features:
            feature.add_figures(logs, state.global_step)
        state.log_history[-1].update(logs)


class OtherRanks(Feature):
    """Gives each rank random numbers of its own where another number of ranks goes on, from the run's seed and the step only.

    What they decide (LoRA's dropout) cannot be what the other number of ranks would have had.
    """

    def __init__(self, trainer: TrainingContext) -> None:
        self.trainer = trainer
        self.checkpoint: Path | None = None

    def begin(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint

    def on_step_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Before the first step that a run trains: by then Transformers has loaded what this rank's number had."""
        checkpoint, self.checkpoint = self.checkpoint, None
        run = self.trainer.run
        if checkpoint and (not self.trainer.replica.own or compatibility.is_divided_otherwise(checkpoint, run)):
            # The ranks of a tensor group must drop the same.
            numbers = np.random.SeedSequence(
                (run.settings.recipe.training.seed, state.global_step, self.trainer.data_rank)
            )
            transformers.set_seed(int(numbers.generate_state(1)[0]))
