"""Objectives that compare answers, in training and in evaluations.

A forward pass gives the loss of each target token (loss/own_loss.py); the rest of a step works with one number for each answer.
What these numbers are compared with is completed before the step: the reference, with adapters off, and KTO's divergence, which
is a mean over the global batch.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ..data import answers as of_batch
from ..data.answers import ANSWERS, MISMATCHED, REFERENCE
from ..data.store import MicroBatch
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..engines.parallel import sequence
from ..recipe.objectives import JUDGED, begins_as_reference, objective_of, precomputes, reference_of
from .averages import Averages
from .objective import load
from .objective.contract import compare, margin_of, means_of, sums
from .reference import Reference, log_probabilities, looking

ACCURACIES = "rewards/accuracies"
_DIVERGENCE = "divergence"  # of a step, beside what of_batch has of a micro-batch


class Preferences(Averages):
    """Computes the recipe's objective."""

    def __init__(self, trainer: StepContext) -> None:
        super().__init__()
        settings = trainer.run.settings
        training = settings.recipe.training
        self.trainer, self.rows = trainer, objective_of(training).rows
        self.function = load.loss_of(settings)
        self.options = load.options_of(training)
        self.parts = trainer.run.strategy.axes.sequence
        self.reference: Reference | None = None
        named = reference_of(settings.recipe)
        if named:
            self.reference = Reference(trainer, named, precomputes(settings.recipe))

    def begin(self, checkpoint: Path | None) -> None:
        if self.reference:
            self.reference.prepare(checkpoint)

    # ---- what answers are compared with ------------------------------------------------------------------------------
    def before_micro_batches(self, micro_batches: list[MicroBatch]) -> None:
        this_process.heartbeat.enter(heartbeat.FORWARD)
        self.add_references(micro_batches)
        if self.rows == JUDGED:
            ratios = torch.zeros(2, dtype=torch.float64, device=self.trainer.args.device)
            for batch in micro_batches:
                own = self.mismatched_ratios(batch)
                ratios += torch.stack([own.sum(), own.new_full((), len(own))])
            if distributed.is_initialized():
                distributed.all_reduce(ratios)  # ranks with the same tokens count equally often
            divergence = (ratios[0] / ratios[1]).clamp(min=0)
            for batch in micro_batches:
                batch[ANSWERS][_DIVERGENCE] = divergence

    def add_references(self, micro_batches: list[MicroBatch]) -> None:
        """Add REFERENCE to micro-batches whose samples came without it."""
        if not self.reference or self.reference.precomputes:
            return
        with looking(self.trainer):
            for batch in micro_batches:
                for each in (batch, batch[ANSWERS].get(MISMATCHED)):
                    if each is not None:
                        each[ANSWERS][REFERENCE] = self.reference.log_probabilities(each)

    def mismatched_ratios(self, batch: MicroBatch) -> torch.Tensor:
        """Return the log-ratios of the answers to other prompts: (answers,)"""
        others = batch[ANSWERS][MISMATCHED]
        with looking(self.trainer):
            return log_probabilities(self.trainer, others, self.trainer.token_losses) - others[ANSWERS][REFERENCE]

    # ---- the loss ----------------------------------------------------------------------------------------------------
    def loss(self, token_losses: torch.Tensor, batch: MicroBatch, items: torch.Tensor | int) -> torch.Tensor:
        """Return this micro-batch's part of the step's loss, a scalar in fp32, and count its figures.

        token_losses: (targets,); items: pairs or labelled answers of the step over all ranks
        """
        answers = batch[ANSWERS]
        found = sums(token_losses, answers)
        if not len(found):  # filler: every parameter stays in the graph
            return 0.0 * token_losses.sum()
        if self.parts > 1:
            found = sequence.summed(found)
        reference, desirable = answers.get(REFERENCE), answers.get(of_batch.DESIRABLE)
        about = answers[of_batch.TOKENS], reference, desirable, answers.get(_DIVERGENCE)
        result = compare(self.function, self.options, found, *about)
        for figure in result.totals():
            self.count(*figure)
        # Each rank of a group that divides sequences has the whole loss.
        return (result.losses.sum() / (items * self.parts)).float()

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        """The figures of the objective, as means over the pairs or answers since the last entry."""
        super().add_figures(logs, step)
        logs |= margin_of(logs)

    # ---- an evaluation -----------------------------------------------------------------------------------------------
    def held_out(self) -> dict[str, float]:
        """Return the mean loss and figures over all held-out items, and with several sources over each one's. A collective.

        They do not depend on ranks and micro-batches, because answers are compared once all are known. There are no accuracies
        while the model is its own reference.
        """
        trainer = self.trainer
        place = trainer.place
        speaks = place.speaks_for_its_data and not place.sequence
        own: dict[str, list[list[float]]] = {}
        for name, samples in trainer.data.heldout.items():
            own[name] = []
            for inputs in trainer.eval_loader(samples):
                batch = trainer.to_device(inputs)
                own[name] += self._numbers(batch)
        of_ranks = ranks.gather_all(own if speaks else {})
        metrics: dict[str, float] = {}
        every: list[list[float]] = []
        for name in trainer.data.heldout:
            numbers = [each for of_rank in of_ranks for each in of_rank.get(name, ())]
            every += numbers
            if len(trainer.data.heldout) > 1:
                metrics |= self._metrics(f"eval_{name}_", numbers)
        metrics = self._metrics("eval_", every) | metrics
        if not trainer.state.global_step and begins_as_reference(trainer.run.settings.recipe):
            # Each reward is 0 but for rounding, and a comparison of two would say which is rounded up.
            return {name: mean for name, mean in metrics.items() if not name.endswith(ACCURACIES)}
        return metrics

    def _numbers(self, batch: MicroBatch) -> list[list[float]]:
        """Return for each answer of a micro-batch: its log-probability, its tokens, the reference's log-probability, its label,
        and the log-ratio of the answer to another prompt; NaN for what the objective does not have."""
        answers = batch[ANSWERS]
        self.add_references([batch])
        with looking(self.trainer):
            found = log_probabilities(self.trainer, batch, self.trainer.token_losses)
        missing = torch.full_like(found, math.nan)
        others = self.mismatched_ratios(batch) if MISMATCHED in answers else missing
        columns = [found, answers[of_batch.TOKENS], answers.get(REFERENCE, missing)]
        columns += [answers.get(of_batch.DESIRABLE, missing), others]
        rows: list[list[float]] = torch.stack([column.double() for column in columns], dim=1).tolist()
        return rows

    def _metrics(self, prefix: str, numbers: list[list[float]]) -> dict[str, float]:
        found, tokens, reference, desirable, others = torch.tensor(numbers, dtype=torch.float64).unbind(1)
        known = None if reference.isnan().all() else reference
        about: list[Any] = [tokens, known]
        if not desirable.isnan().all():
            about += [desirable.bool(), others.mean().clamp(min=0)]
        result = compare(self.function, self.options, found, *about)
        return {prefix + name: mean for name, mean in means_of(result).items()}
