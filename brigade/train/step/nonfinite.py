"""Every step is judged before its optimizer step: a loss or a gradient that is NaN or infinite changes no weight.

A loss that is not finite makes its gradients NaN (`spread`), the reduction over ranks carries NaN to all of them, and so does the
gradients' norm, which every rank computes alike. One look at it decides on all ranks together, without a further collective.
ZeRO checks for itself, inside its step, and discards what is not finite (stage_1_and_2.py and stage3.py: step).
What is done with such a step: bad_steps.py.
"""

import math
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from .. import upstream
from ..run.hooks import Feature
from . import bad_steps
from .context import TrainingContext


class StepGuard(TrainerCallback, ExportableState):
    """What a resumed run must know about earlier steps: how many were left out, how many in a row, which was the last, and the
    losses that loss_spike compares with. A checkpoint keeps it under this class's name."""

    KEPT = ("left_out", "in_a_row", "last", "recent")

    def __init__(self) -> None:
        self.left_out, self.in_a_row, self.last = 0, 0, 0
        self.recent: list[float] = []

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {key: getattr(self, key) for key in self.KEPT}}


class NonFinite(Feature):
    """Looks at the losses and the gradients' norm of each step, and at each held-out loss.

    micro_losses: this rank's, in the current step; logged_before: the sum of losses since the last log entry, before this step
    dropped: whether the current step is left out; norm: of its gradients, None where nothing has measured it
    """

    def __init__(self, trainer: TrainingContext) -> None:
        self.trainer = trainer
        self.micro_losses: list[torch.Tensor] = []
        self.logged_before: torch.Tensor | None = None
        self.dropped = False
        self.norm: Any = None

    @property
    def counts(self) -> StepGuard:
        """The counts so far. A run that resumes has other ones, with its checkpoint's state."""
        return next(each for each in self.trainer.callback_handler.callbacks if isinstance(each, StepGuard))

    def before_step(self) -> None:
        self.micro_losses.clear()
        self.dropped = False
        self.logged_before = upstream.logged_so_far(self.trainer)

    def after_micro_batch(self, loss: torch.Tensor) -> None:
        self.micro_losses.append(loss)

    def judge(self, norm: torch.Tensor | float | None) -> torch.Tensor | float | None:
        """Return the gradients' norm as it is, or None where the step is left out. Waits for the norm.

        Raises UserError on all ranks where such a step is to stop the run.
        """
        self.norm = norm
        finite = norm is None or math.isfinite(norm)
        if finite and not self.trainer.run.settings.recipe.training.loss_spike:
            return norm
        return bad_steps.judge_spike(self.trainer, norm) if finite else bad_steps.judge_not_finite(self.trainer, norm)

    def on_log(self, args: object, state: TrainerState, control: object, logs: dict[str, float], **_: object) -> None:
        """Raise UserError on all ranks where a held-out loss is not finite; these losses are means over all ranks."""
        for key, value in logs.items():
            if key.endswith("_loss") and not math.isfinite(value):
                raise bad_steps.error(f"the held-out loss ({key}) is {value}", self.trainer, state.global_step)


def spread(loss: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the loss times a factor. A loss that is not finite gets gradients of NaN: where a single probability is zero, the
    loss is infinite and its gradient is not."""
    value = loss.detach()
    return loss * (factor + (value - value))
