"""Every touch of a private name of torch, Transformers, Accelerate, DeepSpeed, PEFT and bitsandbytes: what goes wrong without it,
and its line. Who raises one of their versions looks here first.

Lines are those of the versions in constraints.txt. The larger ones have files of their own: locks.py (torch), nvme_resume.py
(DeepSpeed). Private methods of Transformers' Trainer that ours overrides are in training/trainer.py and training/evaluation.py;
tests/unit/test_upstream.py says when one of them is gone. Nothing of theirs is imported before it is asked for.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# ---- several runs in one process ---------------------------------------------------------------------------------
def forget_earlier_run() -> None:
    """What an earlier run left in the engines' modules: a ZeRO-3 configuration would shard whatever is built from now on
    (transformers/integrations/deepspeed.py: _hf_deepspeed_config_weak_ref), and hpZ's groups may be made only once
    (deepspeed/utils/groups.py: _ZERO_PARAM_INTRA_PARALLEL_GROUP)."""
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()
    if "deepspeed.utils.groups" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # type: ignore[attr-defined]


@contextmanager
def without_zero3() -> Iterator[None]:
    """Models are built whole meanwhile: where a ZeRO-3 configuration lives, Transformers shards each of them (as above)."""
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


# ---- Transformers ------------------------------------------------------------------------------------------------
def take_one_device(arguments: Any) -> None:
    """One process takes one device: with several, Trainer wraps the model in nn.DataParallel (training_args.py: _n_gpu)."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1


def save_on_the_first_rank_alone(model: Any) -> None:
    """Weights are written on rank 0 alone, save_on_each_node or not (distributed/mixin.py:345); here on the first rank of each
    host, which has a directory of its own."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process


def mend_loaded(model: Any) -> None:
    """What from_pretrained leaves in a model.

    - Renamings: ZeRO-3's way of loading keeps those that matched nothing (integrations/deepspeed.py:485), and saving undoes all.
    - Layers: Gemma 3 names one of a text encoder, too, which it does not have, and accelerate looks for each by its name.
    - On a CPU with AVX512-BF16 bitsandbytes 0.50.2 repacks weights at the first evaluation, and from then on no gradient passes
      through them (nn/modules.py:614, autograd/_functions.py:422: a product without a backward pass).
    """
    if renamings := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]
    there = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in model._no_split_modules or () if name in there]
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def purge_tensorboard(callback: Any, step: int) -> None:
    """Hide what an interrupted run has logged from `step` on: the callback passes no purge_step on
    (integrations/integration_utils.py: TensorBoardCallback)."""
    callback.tb_writer = callback._SummaryWriter(log_dir=callback.logging_dir, purge_step=step)


def take_rates_of(schedule: Any) -> None:
    """Set the learning rates of a LambdaLR's own curve: a checkpoint brings back those of the length that its run had, and the
    first step of a lengthened run would still have them (torch/optim/lr_scheduler.py: _last_lr)."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    schedule._last_lr = [base * at(schedule.last_epoch) for base, at in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate


# ---- Accelerate --------------------------------------------------------------------------------------------------
def scale_losses_on_cpus(accelerator: Any) -> None:
    """fp16 on a CPU: it casts and scales nothing there, without a word (accelerator.py:568), though torch can do both."""
    import torch

    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")


def shard_on_cpus() -> None:
    """AcceleratorState turns to FSDP only from a type of its GPU list, and trains as DDP otherwise, without a word (state.py)."""
    from accelerate.state import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def send_buffers_with_weights() -> None:
    """Give FSDP2's ranks also the buffers that the first one has loaded. What a state dict holds is taken for shards
    (utils/fsdp_utils.py:628), also buffers, which stay whole: DeepSeek-V3 and GLM-4-MoE keep their routers' biases there."""
    import torch
    from accelerate.utils import fsdp_utils
    from torch.distributed.tensor import DTensor

    send_weights = fsdp_utils.fsdp2_load_full_state_dict
    if hasattr(send_weights, "__wrapped__"):
        return

    @functools.wraps(send_weights)
    def send(accelerator: Any, model: Any, full_sd: "dict[str, torch.Tensor]", **options: Any) -> Any:
        buffers = {}
        for name, value in model.state_dict().items():
            of, _, name_there = name.rpartition(".")
            if not isinstance(value, DTensor) and name_there in (module := model.get_submodule(of))._buffers:
                buffers[name] = (module, name_there, value)
                module._non_persistent_buffers_set.add(
                    name_there
                )  # out of the state dict, until it is registered again
        send_weights(accelerator, model, full_sd, **options)
        for name, (module, name_there, empty) in buffers.items():
            whole = full_sd[name] if accelerator.is_main_process else torch.empty_like(empty, device="cpu")
            whole = whole.to(accelerator.device)
            torch.distributed.broadcast(whole, src=0)
            module.register_buffer(name_there, whole)
        return model

    fsdp_utils.fsdp2_load_full_state_dict = send


# ---- PEFT --------------------------------------------------------------------------------------------------------
def find_adapters_under_checkpointing() -> None:
    """PEFT names adapters' weights by their modules (tuners_utils.py:1717), under FSDP2's activation checkpointing among them a
    wrapper that no state dict names: checkpoints would hold no adapter."""
    from peft.tuners import tuners_utils

    found = tuners_utils._get_tuner_state_dict_key_prefixes
    if not hasattr(found, "__wrapped__"):
        tuners_utils._get_tuner_state_dict_key_prefixes = functools.wraps(found)(
            lambda *args, **options: {
                name.replace("_checkpoint_wrapped_module.", "") for name in found(*args, **options)
            }
        )


# ---- torch -------------------------------------------------------------------------------------------------------
def whole_gradients(model: Any) -> Iterator[Any]:
    """Gradients, or None, that FSDP2 keeps whole where their reduction is delayed to the last micro-batch
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    yield parameter.unsharded_accumulated_grad
                    yield getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
