"""The private methods of Transformers' Trainer that a run replaces. Each calls a method of ours, whose name says what it is for.

Transformers has no event between wrapping the model and the first step, none for gradients before they are clipped, and no
way to write a checkpoint otherwise. Functions without a file are those of its trainer.py.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from ...errors.tables import Fields
from . import any_layer_kinds


class HookedTrainer(transformers.Trainer):
    """Transformers' Trainer, which tells ours when it prepares a run, has gradients, and wants a checkpoint."""

    @abstractmethod
    def before_wrapping(self, checkpoint: Path | None) -> None:
        """Prepare what must be ready before the model is wrapped. The state is the checkpoint's."""

    @abstractmethod
    def after_wrapping(self, checkpoint: Path | None, steps: int) -> None:
        """Complete what a checkpoint has given, before the first of so many steps."""

    @abstractmethod
    def loads_by_itself(self, checkpoint: Path) -> bool:
        """Whether the engine reads this checkpoint without help."""

    @abstractmethod
    def complete_weights(self, checkpoint: Path) -> None:
        """Load what Transformers passes over in a checkpoint's weights."""

    @abstractmethod
    def clip(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float | None:
        """Clip gradients to this norm (0: leave them), and return the norm before."""

    @abstractmethod
    def judge(self, norm: torch.Tensor | float | None) -> torch.Tensor | float | None:
        """Return a step's norm, or None where its optimizer step is left out."""

    @abstractmethod
    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> Any:
        """Transformers' own wraps the model, makes optimizer and schedule, and loads a checkpoint into them."""
        checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self.before_wrapping(checkpoint)
        loads = checkpoint is not None and self.loads_by_itself(checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint if loads else None)
        self.after_wrapping(checkpoint, max_steps)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Transformers' own loads weights; train() calls it, too, before the model is wrapped."""
        if self.loads_by_itself(Path(resume_from_checkpoint)):
            with any_layer_kinds():
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            self.complete_weights(Path(resume_from_checkpoint))

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | float | None:
        """Called where max_grad_norm is not 0."""
        return self.clip(model, self.args.max_grad_norm)

    def _get_grad_norm(
        self, model: torch.nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        """Return the norm that is logged; the last word before the optimizer's step."""
        return self.judge(self.clip(model, 0.0) if grad_norm is None else grad_norm)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Transformers' own writes one file after another into the directory that already has the checkpoint's name."""
        self.save_checkpoint()

    def engines_norm(self, model: torch.nn.Module) -> torch.Tensor | float | None:
        """The norm that DeepSpeed has measured, and clipped by (_get_grad_norm)."""
        return super()._get_grad_norm(model)

    def forward_and_backward(
        self, model: torch.nn.Module, inputs: Fields, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Return the loss of a micro-batch, whose gradients are there then.

        It is what training_step does for our engines and optimizers, but for its walk through all modules, in each
        micro-step, to tell them that they train.
        """
        if not (model.training and self.model.training):
            model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, self.to_device(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))
        return loss.detach()

    @abstractmethod
    def to_device(self, inputs: Fields) -> Fields:
        """Return a micro-batch on the device. Transformers' own (_prepare_inputs) also casts what is no integer to
        DeepSpeed's precision, a reference's log-probabilities too."""


def clear_only(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> None:
    """Let model.zero_grad() clear these parameters' gradients, and not look for them in all modules (_run_epoch)."""

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in parameters:
            parameter.grad = None

    model.zero_grad = zero_grad


def count_once(model: torch.nn.Module) -> None:
    """Let model.num_parameters(), which Transformers asks in each micro-step (floating_point_ops), look through all modules only
    once."""
    if hasattr(model, "num_parameters"):  # not a stage of a pipeline
        model.num_parameters = functools.cache(model.num_parameters)


class ResumedTensorBoard(TensorBoardCallback):
    """Hides what an interrupted run has logged of the steps that this one trains again, or anew.

    Transformers' own passes no purge_step on (integrations/integration_utils.py).
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **about: object
    ) -> None:
        self.again = state.global_step + 1 if state.global_step else 0
        super().on_train_begin(args, state, control, **about)

    def _init_summary_writer(self, args: object) -> None:
        self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=self.again)


def resume_tensorboard(callbacks: list[transformers.TrainerCallback]) -> None:
    """Put ResumedTensorBoard in the place of Transformers' own callback, the first one; those of a user come later, and stay
    (Trainer.__init__)."""
    own = next(place for place, callback in enumerate(callbacks) if type(callback) is TensorBoardCallback)
    callbacks[own] = ResumedTensorBoard()


def let_swanlab_have_no_run() -> None:
    """Let swanlab.get_run() return None while there is no run: SwanLab 0.10 raises then, and Transformers' callback asks before
    it begins one (integration_utils.py: SwanLabCallback.setup). Each run with `--report_to swanlab` would end there."""
    import swanlab

    ask = swanlab.get_run

    def get_run() -> object:
        try:
            return ask()
        except RuntimeError:
            return None

    swanlab.get_run = get_run


# ---- processes that read ahead --------------------------------------------------------------------------------------
def end_workers(loader: DataLoader) -> None:
    """End them, where a loader has kept some for its next epoch.

    It has no public way for that. The garbage collector closes the pipes to them before it tells them to end, so that they are
    waited for, for five seconds (torch/utils/data/dataloader.py, _shutdown_workers).
    """
    end = getattr(loader._iterator, "_shutdown_workers", None)
    if end:
        end()
    loader._iterator = None


# ---- fp16 on CPUs ---------------------------------------------------------------------------------------------------
# fp16 without a GPU, for tests.
def scale_losses_on_cpus(accelerator: Accelerator) -> None:
    """fp16 on a CPU: it casts and scales nothing there, without a word (accelerator.py: Accelerator.__init__), though torch can
    do both."""

    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
