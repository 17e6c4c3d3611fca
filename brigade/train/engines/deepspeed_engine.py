"""DeepSpeed's ZeRO, and its AutoTP, which divides layers over tensor groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..model.location import load_config
from ..model.sizes import half_or_full, largest_parameter
from ..recipe.objectives import objective_of
from ..run.directory import add_to_record
from ..strategy.deepspeed_config import fill, swaps_to_nvme
from ..upstream import (
    autotp,
    checkpoint_files,
    deepspeed_kernels,
    deepspeed_optimizers,
    unpickling,
    zero_parameters,
)
from . import deepspeed_needs, shares
from .engine import Engine, Keywords, StepContext
from .parallel import tensor_plan, tensor_trial
from .shares import Moments, Share


class DeepSpeed(Engine):
    """ZeRO-1, 2 and 3, with offload to the host's memory or to NVMe; everything else is in the ds_config."""

    def load_dtype(self) -> torch.dtype:
        return half_or_full(self.run.settings)  # it keeps a master copy in fp32 of its own

    def where(self) -> Keywords:
        return {} if self.run.strategy.kind == "zero3" else super().where()  # its shards, as zero.Init makes them

    def arguments(self) -> Keywords:
        import deepspeed

        deepspeed_kernels.without_shared_memory()
        names = deepspeed_needs.uncompiled(self.run.strategy) if self.run.world.local_rank == 0 else []
        if names:
            print(
                f"DeepSpeed compiles {' and '.join(names)} on host {self.run.world.host} (once; some minutes) ...",
                flush=True,
            )
        # Transformers leaves this out on a CPU, and DeepSpeed then believes that the world size is 1.
        deepspeed.init_distributed(dist_backend="gloo" if self.cpu else "nccl", auto_mpi_discovery=False)
        settings, world, config = self.run.settings, self.run.world, self.run.strategy.ds_config or {}
        named = settings.recipe.cluster.nvme_path
        nvme = Path(named).expanduser() if named else self.run.directory.resolve() / "nvme_offload"
        swaps = swaps_to_nvme(config)
        shard = -(-largest_parameter(settings, load_config(settings)) // world.size) if swaps else 0
        unpickling.allow(unpickling.DEEPSPEED)
        filled = fill(config, world.local_size, nvme, self.training.optim, shard, self.run.directory.resolve())
        return super().arguments() | {"deepspeed": filled}

    def attach(self, trainer: StepContext) -> None:
        super().attach(trainer)
        deepspeed_optimizers.name_first_rate(trainer.args.learning_rate)
        zero_parameters.decide_by_the_present_order()

    def begin(self, trainer: StepContext, checkpoint: Path | None, steps: int) -> None:
        super().begin(trainer, checkpoint, steps)
        add_to_record(self.run, "ds_config", trainer.deepspeed.config)

    def clip(self, trainer: StepContext, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float | None:
        return trainer.engines_norm(model)  # it has clipped by itself, and measured the norm, in float64 on a CPU

    def drop_step(self, trainer: StepContext) -> None:
        # It has dropped the step by itself, inside of backward(). The schedule would wait for it, as for an overflow in fp16.
        trainer.deepspeed.optimizer.overflow = self.training.fp16

    def load_states(self, trainer: StepContext, checkpoint: Path) -> None:
        if getattr(trainer.deepspeed.optimizer, "swap_optimizer", False):
            deepspeed_optimizers.restore(trainer.deepspeed, str(checkpoint))
        deepspeed_optimizers.repeat_steps(trainer.deepspeed.optimizer.optimizer)

    def shares(self, trainer: StepContext) -> Iterable[Share]:
        from ..upstream import zero_shares

        return ((*share, None) for share in zero_shares.shares(trainer.deepspeed.optimizer))

    def held(self, trainer: StepContext) -> Iterator[tuple[str, object, torch.Tensor]]:
        for name, parameter in trainer.model.named_parameters():
            # Each part of a weight under ZeRO-3 is one rank's, but small weights are whole on all.
            if not hasattr(parameter, "ds_tensor") or zero_parameters.is_kept(parameter):
                yield name, self.part_of(name, parameter), parameter.detach()

    def held_states(self, trainer: StepContext) -> Iterator[tuple[str, object, torch.Tensor]]:
        return iter(())  # each is one rank's alone

    def spread_weights(self, trainer: StepContext) -> None:
        from ..upstream import zero_shares

        zero_shares.spread_weights(trainer.deepspeed, trainer.state.global_step)

    def optimizer(self, trainer: StepContext) -> torch.optim.Optimizer:
        return trainer.deepspeed.optimizer.optimizer

    def load_moments(self, trainer: StepContext, moments_of: Moments) -> None:
        from ..upstream import zero_shares

        zero_shares.load_moments(trainer.deepspeed.optimizer, moments_of)

    def loss_scale(self, trainer: StepContext) -> dict[str, float] | None:
        return {"scale": float(trainer.deepspeed.optimizer.loss_scaler.cur_scale)} if self.training.fp16 else None

    def set_loss_scale(self, trainer: StepContext, state: Mapping[str, float]) -> None:
        if self.training.fp16:
            trainer.deepspeed.optimizer.loss_scaler.cur_scale = float(state["scale"])

    def save_weights(self, trainer: StepContext, folder: Path) -> None:
        state = None if self.run.settings.recipe.model.use_peft else self.whole_state(trainer)
        if state is None:
            super().save_weights(trainer, folder)
            return
        checkpoint_files.name_once(state, trainer.model)
        checkpoint_files.save_model(trainer, trainer.model, folder, state)

    def whole_state(self, trainer: StepContext) -> dict[str, torch.Tensor] | None:
        if self.run.settings.recipe.model.use_peft or not self.gathers_weights(trainer):
            return None
        return trainer.accelerator.get_state_dict(trainer.deepspeed) or {}

    def kept_dtype(self) -> torch.dtype:
        return torch.float32

    def masters(self, trainer: StepContext) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        base = trainer.base_files.usual
        if base is None or base.itemsize <= self.load_dtype().itemsize:
            return
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                yield name, safe_get_full_fp32_param(parameter)

    def gathers_weights(self, trainer: StepContext) -> bool:
        zero3 = trainer.deepspeed.zero_optimization_partition_weights()
        adapters = self.run.settings.recipe.model.use_peft  # PEFT gathers them, whatever the file says
        return adapters or not zero3 or trainer.deepspeed.zero_gather_16bit_weights_on_model_save()


class TensorDeepSpeed(DeepSpeed):
    """AutoTP divides the model inside of deepspeed.initialize, by Transformers' plan (runtime/engine.py:
    _apply_autotp_partitioning), and asserts that the ranks of a group have the same batch.

    whole: the shape of each parameter before
    """

    whole: Mapping[str, torch.Size]

    def arguments(self) -> Keywords:
        arguments = super().arguments()
        config = arguments["deepspeed"]
        # DeepSpeed would compare it with the world size, not the data-parallel one.
        config.pop("train_batch_size", None)
        # In every stage: without it the ranks' parts of a matrix are not gathered for model.safetensors (accelerator.py:
        # get_state_dict).
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        # Its loss of parts of logits is the plain sum over tokens (sequence/cross_entropy.py: VocabParallelCausalLMLoss), puts
        # itself in the place of the recipe's, and would be set on PEFT's wrapper.
        recipe = self.run.settings.recipe
        own = objective_of(self.training).compares or self.training.loss_terms or recipe.data.weighs_samples
        if own or recipe.model.use_peft:
            config["tensor_parallel"]["vocab_parallel_lm_head"] = False
        return arguments

    def where(self) -> Keywords:
        return {}  # no rank's GPU has to hold the model: it is divided later

    def load_model(self, weights: str) -> PreTrainedModel:
        # Under ZeRO-3 Transformers renames no weights where it sees AutoTP (integrations/deepspeed.py:
        # _apply_weight_conversions_to_state_dict), which divides them only later, when they have their names.
        from transformers.integrations.deepspeed import deepspeed_config

        config = deepspeed_config() or {}
        said = config.pop("tensor_parallel")
        try:
            return super().load_model(weights)
        finally:
            config["tensor_parallel"] = said

    def part_of(self, name: str, parameter: torch.Tensor) -> object:
        return () if getattr(parameter, "ds_shape", parameter.shape) == self.whole.get(name) else shares.OwnPart()

    def with_adapters(self, model: torch.nn.Module, weights: str) -> PreTrainedModel:
        model = super().with_adapters(model, weights)
        autotp.give_plan(model, tensor_plan.plan_of(model, tensor_trial.summed_of(self.run.settings)))
        autotp.look_into_adapters()
        return model

    def attach(self, trainer: StepContext) -> None:
        super().attach(trainer)
        self.whole = {name: getattr(each, "ds_shape", each.shape) for name, each in trainer.model.named_parameters()}
        plan = tensor_plan.plan_of(trainer.model, tensor_trial.summed_of(self.run.settings))
        autotp.gather_buffers()
        autotp.split_inputs()
        autotp.sum_gradients(trainer.model, {name for name, style in plan.items() if style == tensor_plan.NORMS})

    def kept_dtype(self) -> torch.dtype:
        return self.load_dtype()

    def masters(self, trainer: StepContext) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())  # each rank of a tensor group has a part of a matrix

    def whole_state(self, trainer: StepContext) -> dict[str, torch.Tensor]:
        return trainer.accelerator.get_state_dict(trainer.deepspeed) or {}

    def answering(self, trainer: StepContext) -> AbstractContextManager[None]:
        return autotp.whole_logits(trainer.model)
