"""Cast weights in fp32 to half precision once per step, and not again in each of its micro-batches."""

from __future__ import annotations

import torch

from ..run.hooks import Feature
from .engine import StepContext


def applies(trainer: StepContext) -> bool:
    """Whether autocast casts weights several times in a step, and holds its copies until the backward pass is over anyhow.

    With activation checkpointing it holds those of one layer at a time: keeping all would take 2 more bytes per parameter.
    Adapters are few, and their base is in half precision. ZeRO and FSDP2 gather weights that are cast, and a pipeline's schedule
    runs a whole step under one autocast.
    """
    recipe, args = trainer.run.settings.recipe, trainer.args
    casts = (args.bf16 or args.fp16) and trainer.run.strategy.kind in ("single", "ddp") and not recipe.model.use_peft
    return casts and not recipe.training.activation_checkpointing and trainer.run.batch.accumulation > 1


class CastWeights(Feature):
    """Keeps autocast's copies of the weights from a step's first micro-batch to its last.

    Autocast forgets them where its outermost context ends (ATen/autocast_mode.cpp). A copy is the same in each micro-batch,
    because weights change in the optimizer's step only; and what is computed is the same, bit for bit.
    """

    kept = False

    def before_step(self) -> None:
        self._forget()
        torch.autocast_increment_nesting()
        self.kept = True

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        self._forget()

    def ended(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """An evaluation must not find copies, nor leave any: its own have no gradient."""
        if self.kept:
            self.kept = False
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
