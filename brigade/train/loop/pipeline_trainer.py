"""Our Trainer over a pipeline: a step is one call of its schedule, with all micro-batches of the global batch."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..distributed import heartbeat
from ..parallel.pipeline import Groups, Pipeline
from ..parallel.pipeline_split import Part
from ..parallel.pipeline_zero1 import Zero1
from . import nonfinite
from .pipeline_answers import generate
from .pipeline_engine import PipelineEngine
from .trainer import Trainer


class PipelineTrainer(Trainer):
    """All ranks of a pipeline draw the same rows, so that between stages only activations travel.

    Transformers' loop hands over one micro-batch after another: they are kept until the last one of the step.
    """

    engine: PipelineEngine
    model: Any
    groups: Groups
    pipeline: Pipeline

    def __init__(self, *args: Any, **options: Any) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.zero1: Any = None  # parallel/pipeline_zero1.py, where optimizer states are divided
        super().__init__(*args, **options)

    def _wrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """Not by accelerate, which would take the ranks for copies of one model."""
        return self.pipeline

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self.run.strategy.kind == "zero1" and self.engine.averaged_over > 1 and self.zero1 is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            experts = [parameter for parameter in trained if self.groups.is_expert(parameter)]
            others = [parameter for parameter in trained if not self.groups.is_expert(parameter)]
            self.zero1 = Zero1(optimizer, [(others, self.groups.data), (experts, self.groups.same)])
        return optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        model.train()
        heartbeat.enter(heartbeat.FORWARD)
        micro_batches, self.waiting = self.waiting, []
        losses = self.pipeline.step(micro_batches, num_items_in_batch)
        nonfinite.guard_of(self).micro_losses.extend(losses)
        heartbeat.enter(heartbeat.OPTIMIZER)
        return torch.stack(losses).sum()

    def compute_part(
        self, part: Part, inputs: dict[str, Any], supervised: Any, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """What a stage returns for a micro-batch: the last one the loss, as compute_loss does."""
        heartbeat.enter(heartbeat.FORWARD if self.model.training else heartbeat.EVALUATION)
        if self.expert_balance:
            self.expert_balance.mask = inputs.get("attention_mask")
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            output = self.outputs(partial(part.forward, hidden), inputs, supervised)
            if part.last and self.model.training:
                output = nonfinite.spread(output.loss, self.engine.averaged_over)
            elif part.last:
                output = output.loss
        if self.model.training:
            heartbeat.enter(heartbeat.BACKWARD)
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call:  # a checkpoint stays in parts
            self.engine.save_weights(self, Path(output_dir or self.args.output_dir))
        else:
            super().save_model(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        own = self.model
        if self.engine.adapted and self.args.should_save:  # PEFT looks for the adapters' modules
            self.model = self.engine.whole_model(self)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = own

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As our Trainer's, but for the optimizer's states, which lie on all ranks."""
        self.engine.save_optimizer(self, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
        self.save_stream(output_dir)

    def answers(self, questions: Any) -> list[list[int]]:
        return generate(self, questions)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In evaluation. Each rank of a pipeline counts the tokens, and one of them has their loss: so many times over."""
        loss = self.pipeline.forward_alone(inputs, num_items_in_batch)
        return torch.zeros(()) if loss is None else loss * len(self.groups.ranks)
