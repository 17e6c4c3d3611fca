"""The engine of a pipeline: each rank loads its own stages, and what is summed over them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..checkpoint.states import States
from ..distributed import ranks
from ..model import experts as of_config
from ..model import load
from ..model.adapter_weights import saved_names
from ..model.location import load_config
from ..model.sizes import empty_model, parameter_count, untaught
from ..run.directory import Run
from .engine import Engine, Keywords, StepContext
from .gradient_clipping import global_norm, scale_
from .parallel import experts, tensor, tensor_plan, tensor_trial
from .parallel import pipeline_schedule as schedules
from .parallel import pipeline_split as splitting
from .parallel.pipeline import Groups, Pipeline
from .parallel.pipeline_state import OwnPart, gathered, save_model, save_optimizer
from .parallel.pipeline_zero1 import Zero1
from .shares import Share, local_part

MUCH = 0.3  # a bubble that is worth a word


class PipelineEngine(Engine):
    """Stages over ranks, and DDP between the ranks that have the same ones.

    layers: of each stage; groups, pipeline, zero1: from attach() and prepare_optimizer() on
    """

    groups: Groups
    pipeline: Pipeline

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.axes = run.strategy.axes
        self.place = self.axes.place(run.world.rank, run.world.size)
        self.first = not (self.place.data or self.place.sequence)  # of the ranks that hold the same
        self.own = schedules.stages_of(self.axes, self.place.stage)
        self.has_head = self.axes.every_stage - 1 in self.own
        self.adapted = run.settings.recipe.model.use_peft
        self.layers: list[range] = []
        self.counts = {False: 0, True: 0}
        self.zero1: Zero1 | None = None  # where optimizer states are divided

    def load_model(self, weights: str) -> PreTrainedModel:
        settings, config = self.run.settings, load_config(self.run.settings)
        self.layers = splitting.split(*splitting.costs(empty_model(settings, config)), self.axes.every_stage)
        layers = {layer for stage in self.own for layer in self.layers[stage]}
        of_stage = splitting.class_of_stage(config, layers, 0 in self.own, self.has_head)
        attention, where = self.run.kernels.attention, self.where()
        return load.load_model(settings, weights, self.load_dtype(), attention, model_class=of_stage, **where)

    def fuse(self, model: PreTrainedModel) -> None:
        with splitting.in_whole(model, empty_model(self.run.settings, model.config)):  # Liger goes through all layers
            super().fuse(model)

    def with_adapters(self, model: PreTrainedModel, weights: str) -> PreTrainedModel:
        with splitting.in_whole(model, empty_model(self.run.settings, model.config)):
            return super().with_adapters(model, weights)

    def arguments(self) -> Keywords:
        return super().arguments() | {"ddp_backend": "gloo" if self.cpu else None}

    def attach(self, trainer: StepContext) -> None:
        super().attach(trainer)
        self.groups = Groups(self.axes, self.run.world.rank, self.run.world.size)
        self.pipeline = Pipeline(
            trainer.model, self.axes, self.layers, self.groups, trainer.args.device, cast(Any, trainer).compute_part
        )
        trainer.model_wrapped = self.pipeline  # Accelerate would take the ranks for copies of one model
        counted = torch.nn.ParameterList(self.pipeline.counted())
        first = self.first and not self.place.tensor  # so far its group has the same
        own = [parameter_count(counted, trained) if first else 0 for trained in (False, True)]
        self.counts = dict(zip((False, True), map(sum, zip(*ranks.gather(own), strict=True)), strict=True))
        if self.axes.divides_layers:
            self._divide_layers(trainer.model, self.groups, trainer.args.device)

    def _divide_layers(self, model: PreTrainedModel, groups: Groups, device: torch.device) -> None:
        axes, size = self.axes, self.run.world.size
        if axes.experts > 1:
            ranks = experts.groups(device.type, size, axes.experts, self.averaged_over, axes.stages, axes.tensor)
            groups.experts, groups.same = ranks, ranks.ranks[experts.DATA].get_group()
            list(experts.divide(model, of_config.plan(model.config), ranks))
        # Beside experts, too, where the group is of one rank: an optimizer steps only DTensors, or none.
        plan, away = {}, splitting.away(model)
        if axes.tensor > 1:
            plan = tensor_plan.plan_of(model, tensor_trial.summed_of(self.run.settings))
        here = {name: style for name, style in plan.items() if name not in away}
        tensor.divide(model, here, groups.mesh(device))

    def prepare_optimizer(self, trainer: StepContext) -> None:
        if self.run.strategy.kind == "zero1" and self.averaged_over > 1:
            trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
            of_experts = [parameter for parameter in trained if self.groups.is_expert(parameter)]
            others = [parameter for parameter in trained if not self.groups.is_expert(parameter)]
            groups = [(others, self.groups.data), (of_experts, self.groups.same)]
            self.zero1 = Zero1(trainer.optimizer.optimizer, groups)

    def parameter_count(self, model: torch.nn.Module, trained: bool = False) -> int:
        return self.counts[trained]

    def clip(self, trainer: StepContext, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float | None:
        own = [parameter.grad for parameter in self.pipeline.counted() if parameter.grad is not None]
        squares = self.pipeline.total(global_norm(own, trainer.args.device) ** 2)
        norm = squares.sqrt()
        if max_norm > 0:
            scale_((parameter.grad for parameter in trainer.model.parameters()), norm, max_norm)
        return norm

    def summary(self) -> dict[str, str]:
        axes, count = self.axes, self.run.batch.accumulation
        layers = ", ".join(str(len(each)) for each in self.layers)
        share = schedules.bubble(axes, count)
        few = "; more accumulation makes it less" if share > MUCH else ""
        said = f"{axes.chosen_schedule}, {layers} layers in its stages, {count} micro-batch{'es' * (count > 1)}"
        return {"pipeline": f"{said}: a rank idles {share:.0%} of a step (bubble){few}"}

    # ---- a checkpoint ------------------------------------------------------------------------------------------------
    def whole_model(self, trainer: StepContext) -> PreTrainedModel:
        model = empty_model(self.run.settings, trainer.model.config)
        for part in untaught(model).values():
            part.requires_grad_(False)
        model.generation_config = trainer.model.generation_config
        if self.adapted:
            model = super().with_adapters(model, "")
            model.peft_config = trainer.model.peft_config
        return model

    def whole_state(self, trainer: StepContext) -> dict[str, torch.Tensor]:
        whole = self.whole_model(trainer)
        if self.adapted:  # the base is where it was
            names = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
        else:
            names = [name for name in whole.state_dict() if name not in whole.all_tied_weights_keys]
        return gathered(self.pipeline, trainer.model.state_dict(), names, wanted=trainer.args.should_save)

    def model_to_save(self, trainer: StepContext) -> PreTrainedModel:
        return self.whole_model(trainer) if self.adapted else trainer.model  # PEFT looks for the adapters' modules

    def save_weights(self, trainer: StepContext, folder: Path) -> None:
        """Write this rank's stages, under the names of the whole model."""
        state = trainer.model.state_dict()
        if self.adapted:
            trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
            state = {saved: state[name] for name, saved in saved_names(trainer.model, trained).items()}
        save_model(folder, {name: each for name, each in state.items() if self.first or self.groups.is_expert(each)})

    def save_optimizer(self, trainer: StepContext, folder: Path) -> None:
        trained = {each: name for name, each in trainer.model.named_parameters() if each.requires_grad}
        optimizer = trainer.optimizer.optimizer
        if self.zero1:
            states = self.zero1.states(trained)
        else:
            kept = (each for each in optimizer.state if self.first or self.groups.is_expert(each))
            states = {trained[parameter]: optimizer.state[parameter] for parameter in kept}
        save_optimizer(folder, states, optimizer.param_groups)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def shares(self, trainer: StepContext) -> Iterable[Share]:
        if self.zero1:
            return (
                (each.parameter, each.start, each.stop, piece, 0, None) for each, piece in self.zero1.pieces.items()
            )
        trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
        return ((parameter, 0, local_part(parameter).numel(), parameter, 0, None) for parameter in trained)

    def reading(self, source: States, trainer: StepContext) -> States | OwnPart:
        divided = {name: each for name, each in trainer.model.named_parameters() if isinstance(each, DTensor)}
        return OwnPart(source, divided) if divided else source

    def spread_weights(self, trainer: StepContext) -> None:
        if self.zero1:
            self.zero1.hand_out()
