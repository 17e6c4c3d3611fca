"""What attaches itself to training, and when it is called."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from transformers import TrainerCallback

from ...errors.tables import Document, Fields


class Feature(TrainerCallback):
    """A part of training that not every run has.

    It takes what it needs of Transformers' events (on_step_end, on_save, ...) and of these hooks, which the Trainer calls where
    Transformers has no event: on every rank, and in the order of Trainer.features.
    """

    def before_wrapping(self, checkpoint: Path | None) -> None:
        """Before the model is wrapped, which takes memory and time. The trainer's state is the checkpoint's."""

    def begin(self, checkpoint: Path | None) -> None:
        """Once the engine has its weights and states, before the first step."""

    def reloading(self) -> AbstractContextManager[None]:
        """While the engine loads a checkpoint's weights and states in the middle of a run."""
        return nullcontext()

    def before_step(self) -> None:
        """Before the micro-batches of a step are drawn."""

    def before_micro_batches(self, micro_batches: list[Fields]) -> None:
        """Once the micro-batches of a step are drawn, before the first one's forward pass."""

    def before_micro_batch(self, inputs: Document) -> None:
        """Before the forward pass of a micro-batch; in a pipeline before each of this rank's stages, in evaluations too."""

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        """After its backward pass; in a pipeline after those of the whole step.

        loss: this rank's part of the step's, times the ranks that are averaged over
        """

    def forget_step(self) -> None:
        """Once a step is left out: nothing of it is logged."""

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        """Add to what is logged of the steps up to this one."""

    def at_rest(self) -> AbstractContextManager[None]:
        """While the model is evaluated or saved."""
        return nullcontext()

    def ended(self) -> None:
        """Once training is over, by an error too."""

    def write(self, folder: Path) -> None:
        """Write this rank's files of a checkpoint."""

    def place_in_run(self) -> Fields:
        """Return what a checkpoint's manifest says of it."""
        return {}
