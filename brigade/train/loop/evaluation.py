"""Evaluation while training: held-out loss and perplexity per source, answers to held-out questions, the best checkpoint."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from ..data.store import IGNORED
from ..distributed import heartbeat, ranks
from ..run.directory import Run
from ..strategy.axes import Place
from . import sample_answers
from .engine import Engine
from .throughput import Meter

CLOSE = 2e-3  # relative: a model that was read from its checkpoint has the loss that it had when it was saved


class EvaluatingTrainer(transformers.Trainer):
    """Transformers' Trainer with our evaluation over `eval_dataset`: source name -> held-out samples."""

    run: Run
    place: Place
    data_rank: int
    local_steps: Any
    engine: Engine
    meter: Meter
    looks_as: tuple[int, int]
    control: Any

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure, log and, but for the untrained model, answer questions; returns what was logged. A collective."""
        with heartbeat.within(heartbeat.EVALUATION), self.meter.pause(), self.averaged_model():
            metrics = self.held_out()
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            if self.state.global_step and self.run.settings.recipe.training.eval_answers:
                sample_answers.ask(self)
        return metrics

    def averaged_model(self) -> AbstractContextManager[None]:
        """While the model is looked at: it has the weights that the replicas have averaged."""
        return self.local_steps.averaged() if self.local_steps else nullcontext()

    def held_out(self) -> dict[str, float]:
        """Mean cross-entropy in nats per supervised token, and its exponential, each held-out sample used once.

        `eval_loss` and `eval_perplexity` are over all tokens of all sources; with several sources each has its own,
        `eval_NAME_loss` and `eval_NAME_perplexity`. Sums stay on the device until the end and are then exchanged once,
        in float64 where the device has it, so world size and batch size do not show in the result.
        """
        model, began = self._model_in_use(), time.perf_counter()
        device = self.args.device
        sums = torch.zeros(
            len(self.eval_dataset), 2, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64
        )
        model.eval()
        with torch.no_grad():
            for (loss_sum, tokens), samples in zip(sums, self.eval_dataset.values(), strict=True):
                for inputs in self.get_eval_dataloader(samples):
                    inputs = self._prepare_inputs(inputs)
                    tokens += (inputs["labels"] != IGNORED).sum()
                    with self.compute_loss_context_manager():
                        loss_sum += self.compute_loss(model, inputs, num_items_in_batch=1)  # 1: a sum, not a mean
        model.train()
        of_ranks = ranks.gather_all(sums.tolist())
        totals = [[math.fsum(column) for column in zip(*rows, strict=True)] for rows in zip(*of_ranks, strict=True)]
        named = dict(zip(self.eval_dataset, totals, strict=True)) if len(totals) > 1 else {}
        metrics: dict[str, float] = {}
        for name, (loss, count) in {"": [math.fsum(c) for c in zip(*totals, strict=True)], **named}.items():
            prefix = f"eval_{name}_" if name else "eval_"
            metrics[f"{prefix}loss"] = loss / count
            metrics[f"{prefix}perplexity"] = math.exp(min(loss / count, 700.0))  # 709 overflows
        return metrics | {"eval_runtime": time.perf_counter() - began}

    def _model_in_use(self) -> Any:
        """The model that train() wrapped: evaluating before it would train DDP unwrapped and crash ZeRO-3."""
        model = self.model_wrapped
        if not self.is_in_train and self.run.world.size > 1 and model is self.model and not self.is_fsdp_enabled:
            raise RuntimeError("evaluate() before train() breaks distributed training: call train() first")
        return model

    def answers(self, questions: Any) -> list[list[int]]:
        """In token ids. A collective."""
        # Not through the wrapper: DDP has no generate, and under ZeRO-3 and FSDP2 the hooks sit on the modules.
        # Hence no autocast of its own either, and ends that are trained whole in fp32 would meet frozen layers in bf16.
        with self.accelerator.autocast(), self.engine.answering(self):
            return sample_answers.generate(
                self.model,
                self.processing_class,
                questions,
                *self.looks_as,
                self.args.device,
            )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Of the evaluations, only those whose model is about to be saved can belong to the best checkpoint.

        Which one it is all ranks decide by the loss; Transformers looks for a directory, which other hosts may not see.
        """
        best = bool(self.control.should_save and super()._determine_best_metric(metrics, trial))
        if best:
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
        return best

    def _load_best_model(self) -> None:
        with heartbeat.within(heartbeat.LOADING):
            super()._load_best_model()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run that ended with its last checkpoint, and died before its model was saved, has no step left to train.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def final_evaluation(self) -> float:
        """Held-out loss of the model that is about to be saved: the last step's, or the best checkpoint's."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            loss, then = self.held_out()["eval_loss"], self.state.best_metric
            if not math.isclose(loss, then, rel_tol=CLOSE):  # Transformers only warns when it finds no file to load
                raise RuntimeError(
                    f"the model of {self.state.best_model_checkpoint} was not loaded: its held-out loss was "
                    f"{then:.6f}, now it is {loss:.6f}; do all hosts see the output directory?"
                )
            return loss
        found = [entry for entry in self.state.log_history if "eval_loss" in entry]
        if not found or found[-1]["step"] != self.state.global_step:
            return self.evaluate()["eval_loss"]
        return found[-1]["eval_loss"]
