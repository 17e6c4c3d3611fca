"""Evaluation while training: held-out loss and perplexity per source, answers to held-out questions, and early stopping."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from ...errors.console import counted
from ..data.prepare import Prepared
from ..data.store import IGNORED
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines.engine import Engine
from ..loss.distillation import Distillation
from ..loss.preferences import Preferences
from ..recipe.objectives import HELD_OUT, HIGHER, SCORE, objective_of, to_minimise
from . import sample_answers
from .batches import BatchingTrainer

CLOSE = 2e-3  # relative: a model that was read from its checkpoint has the loss that it had when it was saved


class EvaluatingTrainer(BatchingTrainer):
    """Transformers' Trainer with our evaluation over `eval_dataset`: source name -> held-out samples."""

    engine: Engine
    control: Any
    preferences: Preferences | None
    distillation: Distillation | None
    data: Prepared

    @abstractmethod
    def at_rest(self) -> AbstractContextManager[object]:
        """Return the context in which the model is evaluated."""

    def evaluate(self, *_: object, **__: object) -> dict[str, float]:
        """Measure and log; answer questions, except with the untrained model; return what was logged. A collective."""
        this_process.timeline.enter("first evaluation")
        with this_process.heartbeat.within(heartbeat.EVALUATION), self.meter.pause(), self.at_rest():
            metrics, training = self.held_out(), self.run.settings.recipe.training
            if training.eval_answers and not objective_of(training).scores:
                metrics |= sample_answers.ask(self)
            known = (self.callback_handler.callbacks, metrics, self._stored(), training.metric_for_best_model)
            forget_other_samples(self.state, *known)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _stored(self) -> int:
        return sum(samples.stored for samples in self.eval_dataset.values())

    def held_out(self) -> dict[str, float]:
        """Mean cross-entropy in nats per supervised token, and its exponential, each held-out sample used once.

        `eval_loss` and `eval_perplexity` are over all tokens of all sources; with several sources each has its own,
        `eval_NAME_loss` and `eval_NAME_perplexity`. With a teacher `eval_divergence` is the mean divergence from it. Sums
        stay on the device until the end and are then exchanged once, in float64 where the device has it, so world size and batch
        size do not show in the result. Where an objective compares answers, the figures are those of Preferences.held_out().
        """
        model, began = self.model_wrapped, time.perf_counter()
        evaluated = sum(map(len, self.eval_dataset.values()))
        if self.preferences:
            compared = self.preferences.held_out()
            return compared | {"eval_samples": evaluated, "eval_runtime": time.perf_counter() - began}
        device = self.args.device
        sums = torch.zeros(
            len(self.eval_dataset), 4, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64
        )
        model.eval()
        with torch.no_grad():
            for (loss_sum, tokens, *apart), samples in zip(sums, self.eval_dataset.values(), strict=True):
                for inputs in self.eval_loader(samples):
                    inputs = self.to_device(inputs)
                    tokens += (inputs["labels"] != IGNORED).sum()
                    with self.compute_loss_context_manager():
                        loss_sum += self.compute_loss(model, inputs, num_items_in_batch=1)  # 1: a sum, not a mean
                if self.distillation:
                    for whole, own in zip(apart, self.distillation.take_held_out(), strict=True):
                        whole += own
        model.train()
        of_ranks = ranks.gather_all(sums.tolist())
        totals = [[math.fsum(column) for column in zip(*rows, strict=True)] for rows in zip(*of_ranks, strict=True)]
        named = dict(zip(self.eval_dataset, totals, strict=True)) if len(totals) > 1 else {}
        metrics: dict[str, float] = {}
        every = [math.fsum(column) for column in zip(*totals, strict=True)]
        for name, (loss, count, apart, compared) in {"": every, **named}.items():
            prefix = f"eval_{name}_" if name else "eval_"
            metrics[f"{prefix}loss"] = loss / count
            metrics[f"{prefix}perplexity"] = math.exp(min(loss / count, 700.0))  # 709 overflows
            if compared:
                metrics[f"{prefix}divergence"] = apart / compared
        return metrics | {"eval_samples": evaluated, "eval_runtime": time.perf_counter() - began}

    def answers(self, questions: list[sample_answers.Question], longest: int) -> list[list[int]]:
        """Return the model's answers in at most `longest` token ids. A collective."""
        # Not through the wrapper: DDP has no generate, and under ZeRO-3 and FSDP2 the hooks sit on the modules.
        # Hence no autocast of its own either, and ends that are trained whole in fp32 would meet frozen layers in bf16.
        with self.accelerator.autocast(), self.engine.answering(self):
            return sample_answers.generate(
                self.model,
                self.processing_class,
                questions,
                *self.looks_as,
                self.args.device,
                self.data.images,
                self.args.per_device_eval_batch_size,
                longest,
            )

    def final_evaluation(self) -> float:
        """Return the held-out loss of the model that is about to be saved: the last step's, or the best checkpoint's."""
        if self.run.settings.recipe.training.load_best_model_at_end and self.state.best_model_checkpoint:
            metrics, best = self.held_out(), self.state.best_global_step
            evaluations = [entry for entry in self.state.log_history if "eval_loss" in entry and entry["step"] == best]
            # A run that was resumed with another max_eval_samples has nothing to compare with.
            same = evaluations and evaluations[-1].get("eval_samples", self._stored()) == metrics["eval_samples"]
            # Transformers only warns when it finds no file to load.
            now, then = metrics["eval_loss"], evaluations[-1]["eval_loss"] if same else math.nan
            if same and not math.isclose(now, then, rel_tol=CLOSE):
                raise RuntimeError(
                    f"the model of {self.state.best_model_checkpoint} was not loaded: its held-out loss was "
                    f"{then:.6f}, now it is {now:.6f}; do all hosts see the output directory?"
                )
            return now
        evaluations = [entry for entry in self.state.log_history if "eval_loss" in entry]
        if not evaluations or evaluations[-1]["step"] != self.state.global_step:
            return self.evaluate()["eval_loss"]
        return evaluations[-1]["eval_loss"]


def forget_other_samples(
    state: TrainerState,
    callbacks: list[TrainerCallback],
    metrics: dict[str, float],
    stored: int,
    metric: str = "eval_loss",
) -> None:
    """Forget the best held-out figure where it comes from other samples: a run may go on with a different max_eval_samples, or
    with a different eval_answers where their score is the figure.

    metrics: the next evaluation's; stored: how many samples are held out, all of which earlier versions evaluated; metric: the
    recipe's metric_for_best_model
    """
    before = next((entry for entry in reversed(state.log_history) if "eval_loss" in entry), None)
    now, scored = metrics["eval_samples"], metrics.get("eval_answers") if metric == SCORE else None
    was, had = (before or metrics).get("eval_samples", stored), (before or metrics).get("eval_answers", scored)
    if now == was and (scored == had or scored is None):
        return
    state.best_metric = state.best_model_checkpoint = state.best_global_step = None
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            callback.forget()
    if state.is_world_process_zero:
        changed = f"Held-out losses are of {now:,} samples from here on, and were of {was:,}"
        key = "max_eval_samples"
        if now == was:
            changed, key = f"{scored} answers are scored from here on, and were {had}", "eval_answers"
        tqdm.write(f"{changed}: the best one is looked for anew ({key}).")


class EarlyStopping(TrainerCallback, ExportableState):
    """Stops after `patience` evaluations in a row without a better held-out figure; one before the first step is not counted.

    metric: the figure, as metric_for_best_model names it
    Checkpoints hold its count, so that a resumed run stops at the same step.
    """

    def __init__(self, patience: int, metric: str = "eval_loss") -> None:
        self.patience, self.metric = patience, metric
        self.forget()

    def forget(self) -> None:
        """Start over, as before the first evaluation."""
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
                than = f"above {-self.best:.4f}" if self.metric in HIGHER else f"below {self.best:.4f}"
                tqdm.write(
                    f"Stopping at step {state.global_step} of {state.max_steps}: no held-out {HELD_OUT[self.metric]} {than} "
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
