"""DeepSpeed's ZeRO, and its AutoTP, which divides layers over tensor groups."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..model.location import load_config
from ..model.sizes import half_or_full, largest_parameter
from ..parallel import tensor_plan, tensor_trial
from ..recipe.objectives import ANSWERS, objective_of
from ..run.directory import add_to_record
from ..strategy.deepspeed_config import fill, swaps_to_nvme
from ..upstream import (
    autotp,
    checkpoint_files,
    cpu_adam,
    deepspeed_kernels,
    nvme_resume,
    tensor_styles,
    unpickling,
    zero_optimizer,
    zero_parameters,
)
from . import deepspeed_needs
from .engine import Engine

if TYPE_CHECKING:
    from .trainer import Trainer


class DeepSpeed(Engine):
    """ZeRO-1, 2 and 3, with offload to the host's memory or to NVMe; all else is in the ds_config."""

    def load_dtype(self) -> torch.dtype:
        return half_or_full(self.run.settings)  # it keeps a master copy in fp32 of its own

    def where(self) -> dict[str, Any]:
        return {} if self.run.strategy.kind == "zero3" else super().where()  # its shards, as zero.Init makes them

    def arguments(self) -> dict[str, Any]:
        import deepspeed

        deepspeed_kernels.without_shared_memory()
        if self.run.world.local_rank == 0 and (names := deepspeed_needs.uncompiled(self.run.strategy)):
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
        filled = fill(config, world.local_size, nvme, self.training.optim, shard)
        return super().arguments() | {"deepspeed": filled}

    def attach(self, trainer: "Trainer") -> None:
        super().attach(trainer)
        zero_optimizer.name_first_rate(trainer.args.learning_rate)
        zero_parameters.decide_by_the_present_order()

    def begin(self, trainer: "Trainer", checkpoint: Path | None, steps: int) -> None:
        super().begin(trainer, checkpoint, steps)
        add_to_record(self.run, "ds_config", trainer.deepspeed.config)

    def clip(self, trainer: "Trainer", model: Any, max_norm: float) -> Any:
        return trainer.engines_norm(model)  # it has clipped by itself, and measured the norm, in float64 on a CPU

    def drop_step(self, trainer: "Trainer") -> None:
        # It has dropped the step by itself, inside of backward(). The schedule would wait for it, as for an overflow in fp16.
        trainer.deepspeed.optimizer.overflow = self.training.fp16

    def load_states(self, trainer: "Trainer", checkpoint: Path) -> None:
        if getattr(trainer.deepspeed.optimizer, "swap_optimizer", False):
            nvme_resume.restore(trainer.deepspeed, str(checkpoint))
        cpu_adam.repeat_steps(trainer.deepspeed.optimizer.optimizer)

    def shares(self, trainer: "Trainer") -> Any:
        from ..upstream import zero_shares

        return ((*share, None) for share in zero_shares.shares(trainer.deepspeed.optimizer))

    def spread_weights(self, trainer: "Trainer") -> None:
        from ..upstream import zero_shares

        zero_shares.spread_weights(trainer.deepspeed, trainer.state.global_step)

    def optimizer(self, trainer: "Trainer") -> Any:
        return trainer.deepspeed.optimizer.optimizer

    def load_moments(self, trainer: "Trainer", moments_of: Mapping[int, dict[str, Any]]) -> None:
        from ..upstream import zero_shares

        zero_shares.load_moments(trainer.deepspeed.optimizer, moments_of)

    def loss_scale(self, trainer: "Trainer") -> dict[str, Any] | None:
        return {"scale": float(trainer.deepspeed.optimizer.loss_scaler.cur_scale)} if self.training.fp16 else None

    def set_loss_scale(self, trainer: "Trainer", state: Mapping[str, Any]) -> None:
        if self.training.fp16:
            trainer.deepspeed.optimizer.loss_scaler.cur_scale = float(state["scale"])

    def save_weights(self, trainer: "Trainer", folder: Path) -> None:
        state = None if self.run.settings.recipe.model.use_peft else self.whole_state(trainer)
        if state is None:
            super().save_weights(trainer, folder)
            return
        checkpoint_files.name_once(state, trainer.model)
        checkpoint_files.save_model(trainer, trainer.model, folder, state)

    def whole_state(self, trainer: "Trainer") -> dict[str, torch.Tensor] | None:
        if self.run.settings.recipe.model.use_peft or not self.gathers_weights(trainer):
            return None
        return trainer.accelerator.get_state_dict(trainer.deepspeed) or {}

    def kept_dtype(self) -> torch.dtype:
        return torch.float32

    def masters(self, trainer: "Trainer") -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        base = trainer.base_files.usual
        if base is None or base.itemsize <= self.load_dtype().itemsize:
            return
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                yield name, safe_get_full_fp32_param(parameter)

    def gathers_weights(self, trainer: "Trainer") -> bool:
        zero3 = trainer.deepspeed.zero_optimization_partition_weights()
        adapters = self.run.settings.recipe.model.use_peft  # PEFT gathers them, whatever the file says
        return adapters or not zero3 or trainer.deepspeed.zero_gather_16bit_weights_on_model_save()


class TensorDeepSpeed(DeepSpeed):
    """AutoTP divides the model inside of deepspeed.initialize, by Transformers' plan (runtime/engine.py:
    _apply_autotp_partitioning), and asserts that the ranks of a group have the same batch."""

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        config = arguments["deepspeed"]
        # DeepSpeed would compare it with the world size, not the data-parallel one.
        config.pop("train_batch_size", None)
        # In every stage: without it the ranks' parts of a matrix are not gathered for model.safetensors (accelerator.py:4072).
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        # Its loss of parts of logits is a sum over tokens, and it would set it on PEFT's wrapper.
        if self.run.settings.recipe.model.use_peft or objective_of(self.training).rows != ANSWERS:
            config["tensor_parallel"]["vocab_parallel_lm_head"] = False
        return arguments

    def where(self) -> dict[str, Any]:
        return {}  # no rank's GPU has to hold the model: it is divided later

    def load_model(self, weights: str) -> Any:
        # Under ZeRO-3 Transformers renames no weights where it sees AutoTP (integrations/deepspeed.py:345), which divides them
        # only later, when they have their names.
        from transformers.integrations.deepspeed import deepspeed_config

        config = deepspeed_config() or {}
        said = config.pop("tensor_parallel")
        try:
            return super().load_model(weights)
        finally:
            config["tensor_parallel"] = said

    def with_adapters(self, model: Any, weights: str) -> Any:
        model = super().with_adapters(model, weights)
        tensor_styles.give_plan(model, tensor_plan.plan_of(model, tensor_trial.summed_of(self.run.settings)))
        autotp.look_into_adapters()
        return model

    def attach(self, trainer: "Trainer") -> None:
        super().attach(trainer)
        plan = tensor_plan.plan_of(trainer.model, tensor_trial.summed_of(self.run.settings))
        autotp.gather_buffers()
        autotp.split_inputs()
        autotp.sum_gradients(trainer.model, {name for name, style in plan.items() if style == tensor_plan.NORMS})

    def kept_dtype(self) -> torch.dtype:
        return self.load_dtype()

    def masters(self, trainer: "Trainer") -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())  # each rank of a tensor group has a part of a matrix

    def whole_state(self, trainer: "Trainer") -> dict[str, torch.Tensor]:
        return trainer.accelerator.get_state_dict(trainer.deepspeed) or {}

    def answering(self, trainer: "Trainer") -> AbstractContextManager[None]:
        return autotp.whole_logits(trainer.model)
