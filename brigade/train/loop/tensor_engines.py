"""The engines of tensor parallelism: DeepSpeed's AutoTP under ZeRO, and Transformers' plans as DTensors under FSDP2."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import ParallelismConfig

from ..parallel import tensor, tensor_plan, tensor_trial
from ..run.directory import Run
from ..upstream import autotp, fsdp2, tensor_styles
from ..upstream.mesh import WithoutShards
from .engines import FSDP2, HSDP, DeepSpeed


class TensorDeepSpeed(DeepSpeed):
    """AutoTP divides the model inside of deepspeed.initialize, by Transformers' plan (runtime/engine.py:
    _apply_autotp_partitioning), and asserts that the ranks of a group have the same batch."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.averaged_over = run.world.size // run.strategy.axes.tensor

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        config = arguments["deepspeed"]
        # DeepSpeed would compare it with the world size, not the data-parallel one.
        config.pop("train_batch_size", None)
        # In every stage: without it the ranks' parts of a matrix are not gathered for model.safetensors (accelerator.py:4072).
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        if self.run.settings.recipe.model.use_peft:  # it would set the loss of parts of logits on PEFT's wrapper
            config["tensor_parallel"]["vocab_parallel_lm_head"] = False
        return arguments

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

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        plan = tensor_plan.plan_of(trainer.model, tensor_trial.summed_of(self.run.settings))
        autotp.gather_buffers()
        autotp.split_inputs()
        autotp.sum_gradients(trainer.model, {name for name, style in plan.items() if style == tensor_plan.NORMS})

    def whole_state(self, trainer: Any) -> dict[str, torch.Tensor]:
        state = trainer.accelerator.get_state_dict(trainer.deepspeed) or {}
        for second_name in trainer.model.all_tied_weights_keys:  # gathered, the two are no longer one tensor
            state.pop(second_name, None)
        return state

    def answering(self, trainer: Any) -> AbstractContextManager[None]:
        return autotp.whole_logits(trainer.model)


class TensorFSDP2(FSDP2):
    """DTensors of two dimensions: divided over the tensor group, and what each of its ranks has sharded over the data's.

    copies: of the whole model, each over tensor groups
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.averaged_over = run.world.size // run.strategy.axes.tensor
        self.copies = run.strategy.replicate

    def arguments(self) -> dict[str, Any]:
        shard = self.averaged_over // self.copies
        mesh = (ParallelismConfig if shard > 1 else WithoutShards)(
            dp_replicate_size=self.copies, dp_shard_size=shard, tp_size=self.run.strategy.axes.tensor
        )
        return super().arguments() | {"parallelism_config": mesh}

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        if self.run.strategy.axes.tensor == 1:  # experts alone are divided
            return
        summed = tensor_trial.summed_of(self.run.settings)

        def divide(model: Any, _: Any) -> None:
            tensor.divide(model, tensor_plan.plan_of(model, summed), trainer.accelerator.torch_device_mesh["tp"])

        fsdp2.shard_before_layers(divide)


class TensorHSDP(TensorFSDP2, HSDP):
    """The same with the data's ranks in groups, each of which holds a whole model."""


class TensorDDP(TensorHSDP):
    """The same with groups of one rank: nothing is sharded."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.copies = self.averaged_over


ENGINES = {
    "ddp": TensorDDP,
    "zero1": TensorDeepSpeed,
    "zero2": TensorDeepSpeed,
    "zero3": TensorDeepSpeed,
    "fsdp2": TensorFSDP2,
    "hsdp": TensorHSDP,
}
