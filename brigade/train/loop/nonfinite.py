"""Every step is judged before its optimizer step: a loss or a gradient that is NaN or infinite changes no weight.

A loss that is not finite makes its gradients NaN (`spread`), the reduction over ranks carries NaN to all of them, and so does the
gradients' norm, which every rank computes alike. One look at it decides on all ranks together, without a collective more.
ZeRO looks by itself, inside of its step, and discards what is not finite (stage_1_and_2.py:3043, stage3.py:2888).
What is done with such a step: bad_steps.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from .. import upstream
from . import bad_steps


class StepGuard(TrainerCallback, ExportableState):
    """Looks at the losses and the gradients' norm of each step.

    Checkpoints hold what a resumed run must know of earlier steps (KEPT): how many were left out, how many in a row and which was
    the last, and the losses that loss_spike compares with.
    """

    KEPT = ("left_out", "in_a_row", "last", "recent")

    def __init__(self) -> None:
        self.left_out, self.in_a_row, self.last = 0, 0, 0
        self.recent: list[float] = []
        self.micro_losses: list[torch.Tensor] = []  # of this step on this rank
        self.logged_before: Any = None

    def begin(self, trainer: Any) -> None:
        """Before the first micro-batch of a step."""
        self.micro_losses.clear()
        self.logged_before = upstream.logged_so_far(trainer)

    def judge(self, trainer: Any, norm: Any) -> Any:
        """The gradients' norm as it is, or None where the step is left out. Call it before the optimizer's step.

        Waits for the norm. Raises UserError on all ranks where such a step is to stop the run.
        """
        sound = norm is None or math.isfinite(norm)
        if sound and not trainer.run.settings.recipe.training.loss_spike:
            return norm
        return bad_steps.spike(trainer, self, norm) if sound else bad_steps.not_finite(trainer, self, norm)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {key: getattr(self, key) for key in self.KEPT}}


def guard_of(trainer: Any) -> StepGuard:
    """A resumed run has another one, with its checkpoint's state."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, StepGuard))


def spread(loss: torch.Tensor, factor: int) -> torch.Tensor:
    """The loss times a factor. One that is not finite gets gradients of NaN: where a single probability is zero, the loss is
    infinite and its gradient is not."""
    value = loss.detach()
    return loss * (factor + (value - value))


def check_held_out(logs: Mapping[str, Any], trainer: Any) -> None:
    """Raises UserError on all ranks where a held-out loss among these figures is not finite; they are means over all ranks."""
    for key, value in logs.items():
        if key.endswith("_loss") and not math.isfinite(value):
            raise bad_steps.error(f"the held-out loss ({key}) is {value}", trainer, trainer.state.global_step)
