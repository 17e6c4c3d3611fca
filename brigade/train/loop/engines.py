"""The engines: what DDP, DeepSpeed, FSDP2 and HSDP are told, and where each has to be helped.

One class each, whose methods stand in the order in which a run meets them: options of TrainingArguments, the Trainer, the first
step, a micro-step, a checkpoint. The trainer calls these methods and knows no engine by name. What touches a private name of
another package stands in brigade/train/upstream/, with its line there.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .. import upstream
from ..data.collate import Collate
from ..model import load
from ..model.location import load_config
from ..model.sizes import half_or_full, largest_parameter, parameter_count
from ..parallel import tiled
from ..run.directory import Run, add_to_record
from ..strategy.deepspeed_config import fill, swaps_to_nvme
from ..upstream import cpu_adam, fsdp2, nvme_resume, unpickling
from ..upstream.fp16_on_cpus import scale_losses_on_cpus
from . import gradient_compression
from .norms import clip_


class OneProcess:
    """No engine; also what is common to all of them."""

    clips_by_itself = False
    power_sgd: Any = None  # its state, where DDP's hook is PowerSGD

    def __init__(self, run: Run) -> None:
        unpickling.data_only()
        self.run, self.training, self.cpu = run, run.settings.recipe.training, not torch.cuda.is_available()
        # A loss is multiplied by it: gradients are means over so many ranks. A replica has a part of the step's tokens alone, and
        # the mean over replicas is the whole step's.
        self.averaged_over = run.world.size * run.strategy.replicas

    # ---- before the model is loaded --------------------------------------------------------------------------------
    def load_dtype(self) -> torch.dtype:
        """Weights in fp32, cast for the computation (autocast, MixedPrecisionPolicy). Those that stay frozen under adapters
        need no fp32 anywhere."""
        return half_or_full(self.run.settings) if self.run.settings.recipe.model.use_peft else torch.float32

    def load_model(self, weights: str) -> Any:
        """The model from the directory `weights`, before any adapter. After TrainingArguments exist."""
        model = load.load_model(self.run.settings, weights, self.load_dtype())
        if self.training.tiled_loss or self.training.tiled_mlp:
            tiled.apply(model, self.training.tiled_loss, self.training.tiled_mlp)
        return model

    def with_adapters(self, model: Any, weights: str) -> Any:
        """load_model's, for a recipe that trains adapters. weights: where they came from"""
        from ..model import adapters

        return adapters.wrap(model, self.run.settings, weights)

    def arguments(self) -> dict[str, Any]:
        """Options of TrainingArguments. After these exist, ZeRO-3 and FSDP2 decide how a model is loaded."""
        if not self.training.activation_checkpointing:
            return {}
        # The reentrant form finds no input that requires a gradient where embeddings are frozen, and breaks DDP's hooks.
        return {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}

    def after_arguments(self, arguments: Any) -> None:
        upstream.take_one_device(arguments)

    # ---- the Trainer and its model ---------------------------------------------------------------------------------
    def attach(self, trainer: Any) -> None:
        """Once the Trainer exists, before it wraps its model."""
        if self.training.fp16 and self.cpu:
            scale_losses_on_cpus(trainer.accelerator)
        if not self.run.shared:
            upstream.save_on_the_first_rank_alone(trainer.model)

    def collate(self, *how: Any) -> Collate:
        """What makes micro-batches of rows; its arguments are Collate's."""
        return Collate(*how)

    def begin(self, trainer: Any, checkpoint: str | None, steps: int) -> None:
        """Once the model is wrapped, before the first of so many steps."""

    def parameter_count(self, model: Any, trained: bool = False) -> int:
        """Of the whole model, whatever part of it this rank has."""
        return parameter_count(model, trained)

    def whole_model(self, trainer: Any) -> Any:
        """One with all names of the model's parameters, in its order; it may be on the meta device."""
        return trainer.model

    def summary(self) -> dict[str, str]:
        """Further lines of the run's summary."""
        return {}

    # ---- a step ----------------------------------------------------------------------------------------------------
    def before_micro_step(self, trainer: Any, model: Any) -> None:
        """Before each forward and backward pass."""

    def clip(self, trainer: Any, model: Any, max_norm: float) -> Any:
        """The gradients' norm before clipping; on the device, for only logging waits for it."""
        trainer.accelerator.unscale_gradients()
        return clip_(model.parameters(), max_norm)

    def drop_step(self, trainer: Any) -> None:
        """Before the optimizer's step: without gradients it has nothing to do, and changes no state."""
        trainer.model.zero_grad(set_to_none=True)

    # ---- an evaluation ---------------------------------------------------------------------------------------------
    def answering(self, trainer: Any) -> AbstractContextManager[None]:
        """While the model generates answers."""
        return nullcontext()

    # ---- a checkpoint ----------------------------------------------------------------------------------------------
    def save_states(self, folder: Path) -> None:
        """What belongs to a checkpoint besides what the Trainer writes there."""

    def load_states(self, trainer: Any, checkpoint: str) -> None:
        """What the Trainer leaves out when it loads optimizer states."""

    def shares(self, trainer: Any) -> Any:
        """carrying.Share of each tensor that the optimizer steps in a parameter's place, or None where it steps parameters."""
        return None

    def reading(self, source: Any, trainer: Any) -> Any:
        """A checkpoint's states, read by these shares' own numbers."""
        return source

    def spread_weights(self, trainer: Any) -> None:
        """Once the weights in these shares have been set."""

    def whole_state(self, trainer: Any) -> dict[str, torch.Tensor] | None:
        """The state dict to save, or None where the Trainer gathers it by itself."""
        return None

    def gathers_weights(self, trainer: Any) -> bool:
        """Whether a model that the Trainer saves has its weights in Hugging Face format."""
        return True


class DDP(OneProcess):
    def arguments(self) -> dict[str, Any]:
        # PowerSGD's memory belongs to buckets, and only with True are they the same in every process (gradient_compression.py).
        return super().arguments() | {
            "ddp_backend": "gloo" if self.cpu else None,
            "ddp_find_unused_parameters": self.training.ddp_comm_hook == "power_sgd",
        }

    def begin(self, trainer: Any, checkpoint: str | None, steps: int) -> None:
        if self.training.ddp_comm_hook != "none":
            self.power_sgd = gradient_compression.register(trainer.model_wrapped, self.training.ddp_comm_hook, steps)
            if self.power_sgd and checkpoint:
                gradient_compression.restore(self.power_sgd, Path(checkpoint), self.run.world)

    def drop_step(self, trainer: Any) -> None:
        super().drop_step(trainer)
        if self.power_sgd:
            gradient_compression.forget(self.power_sgd)

    def save_states(self, folder: Path) -> None:
        if self.power_sgd:
            gradient_compression.save(self.power_sgd, folder, self.run.world)


class DeepSpeed(OneProcess):
    """ZeRO-1, 2 and 3, with offload to the host's memory or to NVMe; all else is in the ds_config."""

    clips_by_itself = True  # and measures the norm, in float64 on a CPU

    def load_dtype(self) -> torch.dtype:
        return half_or_full(self.run.settings)  # it keeps a master copy in fp32 of its own

    def arguments(self) -> dict[str, Any]:
        import deepspeed

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

    def begin(self, trainer: Any, checkpoint: str | None, steps: int) -> None:
        add_to_record(self.run, "ds_config", trainer.deepspeed.config)

    def drop_step(self, trainer: Any) -> None:
        # It has dropped the step by itself, inside of backward(). The schedule would wait for it, as for an overflow in fp16.
        trainer.deepspeed.optimizer.overflow = self.training.fp16

    def load_states(self, trainer: Any, checkpoint: str) -> None:
        if getattr(trainer.deepspeed.optimizer, "swap_optimizer", False):
            nvme_resume.restore(trainer.deepspeed, checkpoint)
        cpu_adam.repeat_steps(trainer.deepspeed.optimizer.optimizer)

    def gathers_weights(self, trainer: Any) -> bool:
        zero3 = trainer.deepspeed.zero_optimization_partition_weights()
        adapters = self.run.settings.recipe.model.use_peft  # PEFT gathers them, whatever the file says
        return adapters or not zero3 or trainer.deepspeed.zero_gather_16bit_weights_on_model_save()


class FSDP2(OneProcess):
    def arguments(self) -> dict[str, Any]:
        # Sharded checkpoints: a full one would gather the model on rank 0 at every save. And the first rank's weights are sent
        # to the others (model/load.py: load_base): eight copies of an 8B model in fp32 would take 260 GB of host memory.
        defaults = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
            "activation_checkpointing": self.training.activation_checkpointing,
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

    def after_arguments(self, arguments: Any) -> None:
        super().after_arguments(arguments)
        if self.cpu:
            fsdp2.shard_on_cpus()

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        fsdp2.send_buffers_with_weights()
        if self.training.bf16 or self.training.fp16:
            # accelerate would also reduce gradients and hand back the loss in half precision: 8 bits of a loss.
            trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = torch.distributed.fsdp.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.training.bf16 else torch.float16,
                reduce_dtype=torch.float32,
                output_dtype=torch.float32,
            )

    def shares(self, trainer: Any) -> Any:
        for module in trainer.model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.reshard()  # an evaluation leaves some parameters whole
        return super().shares(trainer)

    def whole_state(self, trainer: Any) -> dict[str, torch.Tensor]:
        if self.run.settings.recipe.model.use_peft:  # the adapters' frozen base is not gathered for them
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            alone = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
            return get_model_state_dict(trainer.model, options=alone)
        state = trainer.accelerator.get_state_dict(trainer.model)
        for second_name in trainer.model.all_tied_weights_keys:  # gathered, the two are no longer one tensor
            state.pop(second_name, None)
        return state


class HSDP(FSDP2):
    """FSDP2 within groups of ranks, DDP across them."""

    def arguments(self) -> dict[str, Any]:
        from accelerate import ParallelismConfig

        replicate = self.run.strategy.replicate
        mesh = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=self.run.world.size // replicate)
        return super().arguments() | {"parallelism_config": mesh}

    def before_micro_step(self, trainer: Any, model: Any) -> None:
        # Gradients are reduced inside the group in each micro-step, across groups in the last alone.
        model.set_requires_all_reduce(trainer.accelerator.sync_gradients)


ENGINES = {
    "single": OneProcess,
    "ddp": DDP,
    "zero1": DeepSpeed,
    "zero2": DeepSpeed,
    "zero3": DeepSpeed,
    "fsdp2": FSDP2,
    "hsdp": HSDP,
}
