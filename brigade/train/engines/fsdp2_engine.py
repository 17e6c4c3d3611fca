"""FSDP2 and HSDP, and both where tensor groups divide layers, as DTensors, or groups of ranks divide each layer's experts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from accelerate import ParallelismConfig
from transformers import PreTrainedModel, TrainingArguments

from ..model import experts as of_config
from ..model import load
from ..model.base_weights import check_finite
from ..run.directory import Run
from ..upstream import fsdp2
from ..upstream.fsdp2 import WithoutShards
from . import recomputing
from .engine import Engine, Keywords, StepContext
from .parallel import experts, tensor, tensor_plan, tensor_trial
from .shares import Share


def precision(half: torch.dtype) -> torch.distributed.fsdp.MixedPrecisionPolicy:
    """Return what FSDP2 computes and reduces in.

    accelerate would also reduce gradients and hand back the loss in half precision: 8 bits of a loss. Here outputs stay what they
    are. A loss is fp32 anyway, and an output_dtype would reach every layer, because accelerate gives all the same policy
    (utils/fsdp_utils.py: fsdp2_prepare_model): each layer's output would be cast to fp32, kept so, and cast back by the next.
    """
    return torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)


class FSDP2(Engine):
    """Parameters, gradients and optimizer states are sharded over all ranks, layer by layer.

    source: the directory of the model's weights
    """

    source: str

    def load_model(self, weights: str) -> PreTrainedModel:
        self.source = weights
        return super().load_model(weights)

    def where(self) -> Keywords:
        return {}  # no rank's GPU has to hold the model

    def arguments(self) -> Keywords:
        # Sharded checkpoints: a full one would gather the model on rank 0 at every save. And the first rank sends the others
        # their shards of weights (attach).
        defaults = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
        }
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # Transformers looks for it beside the option
        return {
            "ddp_backend": "gloo" if self.cpu else None,
            "fsdp": True,
            "fsdp_config": defaults | self.run.strategy.fsdp,
            # Gradients are reduced in every micro-step: else each rank keeps them whole until the last, 4 bytes per parameter
            # of the unsharded model (docs/evidence/states.md).
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        }

    def after_arguments(self, arguments: TrainingArguments) -> None:
        super().after_arguments(arguments)
        if self.cpu:
            fsdp2.shard_on_cpus()

    def attach(self, trainer: StepContext) -> None:
        super().attach(trainer)
        read = partial(load.read_weights, self.run.settings, self.source, self.load_dtype())
        one_by_one = load.arrive_one_by_one(self.run.settings, self.source)
        fsdp2.send_weights(read if one_by_one else None, lambda model: check_finite(model, self.source))
        if self.training.activation_checkpointing:
            # By an option of TrainingArguments, Transformers would warn that FSDP2's hooks run once more. They no longer do: it
            # checkpoints what a layer computes inside of them (modeling_layers.py: GradientCheckpointingLayer). Accelerate's own
            # way (fsdp2_apply_ac) would not keep the random state, and what is computed again would drop other values.
            recomputing.enable(trainer.model, self.training)
        if self.cpu and self.run.strategy.fsdp.get("cpu_offload"):  # page-locked memory is a GPU's
            plugin = trainer.accelerator.state.fsdp_plugin
            plugin.cpu_offload = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
        if self.training.bf16 or self.training.fp16:
            half = torch.bfloat16 if self.training.bf16 else torch.float16
            trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = precision(half)

    def shares(self, trainer: StepContext) -> Iterable[Share]:
        _reshard(trainer.model)
        return super().shares(trainer)

    def held(self, trainer: StepContext) -> Iterator[tuple[str, object, torch.Tensor]]:
        _reshard(trainer.model)
        return super().held(trainer)

    def whole_state(self, trainer: StepContext) -> dict[str, torch.Tensor]:
        if self.run.settings.recipe.model.use_peft:  # the adapters' frozen base is not gathered for them
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            only_adapters = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
            return get_model_state_dict(trainer.model, options=only_adapters)
        state: dict[str, torch.Tensor] = trainer.accelerator.get_state_dict(trainer.model)
        return state


def _reshard(model: torch.nn.Module) -> None:
    """Shard again what an evaluation leaves whole."""
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()


class HSDP(FSDP2):
    """FSDP2 within groups of ranks, DDP across them."""

    def arguments(self) -> Keywords:
        replicate = self.run.strategy.replicate
        mesh = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=self.run.world.size // replicate)
        return super().arguments() | {"parallelism_config": mesh}

    def before_micro_step(self, trainer: StepContext, model: torch.nn.Module) -> None:
        # Gradients are reduced inside the group in each micro-step, across groups only in the last.
        model.set_requires_all_reduce(trainer.accelerator.sync_gradients)


class TensorFSDP2(FSDP2):
    """DTensors of two dimensions: divided over the tensor group, each of whose ranks shards its part over the data's ranks.

    copies: of the whole model, each over tensor groups
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # Under DDP a group of the data's ranks is one rank: nothing is sharded.
        self.copies = self.averaged_over if run.strategy.kind == "ddp" else run.strategy.replicate

    def arguments(self) -> Keywords:
        shard = self.averaged_over // self.copies
        mesh = (ParallelismConfig if shard > 1 else WithoutShards)(
            dp_replicate_size=self.copies, dp_shard_size=shard, tp_size=self.run.strategy.axes.tensor
        )
        return super().arguments() | {"parallelism_config": mesh}

    def attach(self, trainer: StepContext) -> None:
        super().attach(trainer)
        if self.run.strategy.axes.tensor == 1:  # only experts are divided
            return
        summed = tensor_trial.summed_of(self.run.settings)

        def divide(model: torch.nn.Module, _: object) -> None:
            tensor.divide(model, tensor_plan.plan_of(model, summed), trainer.accelerator.torch_device_mesh["tp"])

        fsdp2.shard_before_layers(divide)


class TensorHSDP(TensorFSDP2, HSDP):
    """The same with the data's ranks in groups, each of which holds a whole model; and DDP."""


class ExpertFSDP2(TensorFSDP2):
    """The same engine for all but the experts, which are divided, and whose tokens travel. Its batches and means stay what they
    are."""

    def attach(self, trainer: StepContext) -> None:
        axes, plan = self.run.strategy.axes, of_config.plan(trainer.model.config)
        device, world_size = trainer.args.device.type, self.run.world.size
        ranks = experts.groups(device, world_size, axes.experts, self.averaged_over, self.copies, axes.tensor)
        fsdp2.shard_before_layers(lambda model, options: experts.shard(model, plan, ranks, options))
        super().attach(trainer)


class ExpertHSDP(ExpertFSDP2, TensorHSDP):
    """Experts are divided, and all else is sharded within groups of ranks; or, under DDP, whole on each rank."""
