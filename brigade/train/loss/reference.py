"""What the reference thinks of each answer: computed of all before the first step (precomputed.py), or beside each one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.answers import ANSWERS, MISMATCHED
from ..data.store import MISMATCHED_AS, MicroBatch
from ..distributed import consistency
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..engines.parallel import sequence
from ..model import adapter_weights, load
from ..model.location import load_config
from ..recipe.continued import DECIDES, FREE
from ..recipe.objectives import ADAPTERS_OFF, JUDGED, MODEL, objective_of
from . import second_model
from .objective.contract import sums
from .precomputed import Look, Precomputed


@contextmanager
def looking(trainer: StepContext) -> Iterator[None]:
    """While the trained model is looked at, without dropout and gradients."""
    model = trainer.model_wrapped
    training = model.training
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if training:
            model.train()
        torch.clear_autocast_cache()  # its copies of the weights have no gradient


def log_probabilities(
    trainer: StepContext, batch: MicroBatch, token_losses: Callable[[MicroBatch], torch.Tensor]
) -> torch.Tensor:
    """Return the log-probability of each answer of a micro-batch: (answers,), on all ranks that compute it together.

    token_losses: of a micro-batch, by the trained model or another one
    """
    found = sums(token_losses(batch), batch[ANSWERS])
    return sequence.summed(found) if trainer.run.strategy.axes.sequence > 1 else found


class Reference:
    """Gives samples, or micro-batches, the log-probabilities of their answers under the reference.

    reference: ADAPTERS_OFF, MODEL, a directory or a name on the Hub; precomputes: whether they are computed before training
    """

    def __init__(self, trainer: StepContext, reference: str, precomputes: bool) -> None:
        self.trainer = trainer
        self.reference, self.precomputes = reference, precomputes
        # With new adapters the weights that training begins with are there at any time, in their own precision. Those that go on
        # with others begin as something that their own steps take away.
        model = self.trainer.run.settings.recipe.model
        begins = model.use_peft and model.adapter_name_or_path is None
        self.by_adapters = reference == ADAPTERS_OFF or (precomputes and reference == MODEL and begins)
        self.model: Any = None  # beside the trained one

    def prepare(self, checkpoint: Path | None) -> None:
        """Load the reference, or compute what it thinks of all samples. A collective.

        checkpoint: from which the run goes on; the model has its weights already
        """
        this_process.timeline.enter("reference")
        if not self.precomputes:
            if self.reference != ADAPTERS_OFF:
                self.model = second_model.load_reference(self.trainer, self.reference)
            return

        def load() -> Look:
            if not self.by_adapters and (self.reference != MODEL or checkpoint):
                self.model = second_model.load_reference(self.trainer, self.reference)
            return self._look

        judged = objective_of(self.trainer.run.settings.recipe.training).rows == JUDGED
        made_of = self._made_of() + [MISMATCHED_AS] * judged
        precomputed = Precomputed(self.trainer, "reference", "log-probabilities", 1 + judged, made_of)
        with looking(self.trainer):
            precomputed.complete(load)
        self.model = None

    def log_probabilities(self, batch: MicroBatch) -> torch.Tensor:
        """Return the log-probability of each answer of a micro-batch under the reference: (answers,)"""
        return log_probabilities(self.trainer, batch, self.token_losses)

    def token_losses(self, batch: MicroBatch) -> torch.Tensor:
        """Return the reference's loss of each target of a micro-batch: (targets,) in fp32."""
        trainer = self.trainer
        if self.by_adapters:
            with trainer.engine.adapters_off(trainer):
                return trainer.token_losses(batch)
        if self.model is None:
            return trainer.token_losses(batch)
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            losses: torch.Tensor = trainer.outputs(self.model, batch, None).loss
        return losses

    # ---- before training ---------------------------------------------------------------------------------------------
    def _made_of(self) -> list[Any]:
        """Return what identifies the weights that the log-probabilities come from."""
        run, settings = self.trainer.run, self.trainer.run.settings
        digests, config = run.base, self.trainer.model.config
        if self.reference not in (ADAPTERS_OFF, MODEL):
            named = settings.of_second(self.reference)
            config = load_config(named)
            digests = consistency.digests(Path(load.weights(named, config)))
        section, seed = settings.recipe.model, settings.recipe.training.seed
        key = [digests or [config.to_dict(), seed], *second_model.read_as(section)]
        adapters = adapter_weights.find(settings) if self.reference == MODEL else None
        decided = section.model_dump(include={*DECIDES.values()} - {*FREE})
        return key + ([consistency.digests(Path(adapters)), decided] if adapters else [])

    def _look(self, batch: MicroBatch) -> np.ndarray:
        """Return the log-probabilities of a micro-batch's answers and, for KTO, those of the mismatched ones."""
        columns = [batch] + ([batch[ANSWERS][MISMATCHED]] if MISMATCHED in batch[ANSWERS] else [])
        values = [self.log_probabilities(each) for each in columns]
        return torch.stack(values, 1).double().cpu().numpy()
