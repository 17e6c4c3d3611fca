"""Our Trainer over a pipeline: a step is one call of its schedule, with all micro-batches of the global batch."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..data.collate import Inputs, MicroBatch
from ..distributed import heartbeat
from ..distributed.process import this_process
from ..engines.parallel.pipeline_split import Part
from ..engines.pipeline_engine import PipelineEngine
from . import nonfinite, pipeline_answers
from .sample_answers import Question
from .trainer import Trainer


class PipelineTrainer(Trainer):
    """All ranks of a pipeline draw the same sequences, so that between stages only activations travel.

    Transformers' loop hands over one micro-batch after another: they are kept until the last one of the step.
    """

    engine: PipelineEngine
    model: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        self.waiting: list[MicroBatch] = []
        super().__init__(*args, **options)

    def training_step(
        self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        self.waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        model.train()
        this_process.heartbeat.enter(heartbeat.FORWARD)
        micro_batches, self.waiting = self.waiting, []
        losses = self.engine.pipeline.step(micro_batches, num_items_in_batch)
        for loss in losses:
            for feature in self.features:
                feature.after_micro_batch(loss)
        this_process.heartbeat.enter(heartbeat.OPTIMIZER)
        return torch.stack(losses).sum()

    def compute_part(
        self, part: Part, inputs: MicroBatch, supervised: torch.Tensor | int | None, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what a stage makes of a micro-batch: activations, or on the last stage the loss, as compute_loss does."""
        this_process.heartbeat.enter(heartbeat.FORWARD if self.model.training else heartbeat.EVALUATION)
        for feature in self.features:
            feature.before_micro_batch(inputs)
        inputs = self.distillation.read(inputs) if part.last and self.distillation else inputs
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            output = self.outputs(partial(part.forward, hidden), inputs, supervised)
            if part.last:
                output = output.loss
            if part.last and self.model.training:
                if self.preferences:
                    output = self.preferences.loss(output, inputs, supervised)
                output = nonfinite.spread(output, self.engine.averaged_over)
        if self.model.training:
            this_process.heartbeat.enter(heartbeat.BACKWARD)
        return output

    def token_losses(self, inputs: Inputs) -> torch.Tensor:
        pipeline = self.engine.pipeline
        own = pipeline.forward_alone(dict(inputs), None)
        targets = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"]
        losses = torch.empty(targets.numel(), device=self.args.device) if own is None else own
        dist.broadcast(losses, pipeline.last_rank, group=pipeline.groups.stages)
        return losses

    def answers(self, questions: list[Question], longest: int) -> list[list[int]]:
        return pipeline_answers.generate(self, self.engine.pipeline, questions, longest)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return an evaluation's loss, times the ranks of a pipeline: each of them counts the tokens, and only one has a loss."""
        loss = self.engine.pipeline.forward_alone(inputs, num_items_in_batch)
        return torch.zeros(()) if loss is None else loss * len(self.engine.groups.ranks)
