"""FSDP2 as torch, Accelerate, Transformers and PEFT have it together."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..cluster import OWN_NUMBER


def shard_on_cpus() -> None:
    """AcceleratorState turns to FSDP only from a type of its GPU list, and trains as DDP otherwise, without a word (state.py)."""
    from accelerate.state import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def by_number_on_host() -> Iterator[None]:
    """Let only a host's first rank own weights while a model is loaded for FSDP2, also where ranks see one GPU each. Transformers
    goes by LOCAL_RANK (distributed/utils.py: is_local_dist_rank_0), which is 0 for all of them: each would own a copy."""
    from transformers.distributed.fsdp import is_fsdp_enabled

    device, own = os.environ.get("LOCAL_RANK"), os.environ.get(OWN_NUMBER)
    if device is None or own is None or not is_fsdp_enabled():  # ZeRO-3 takes it for the device meanwhile
        yield
        return
    os.environ["LOCAL_RANK"] = own
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = device


@contextmanager
def every_rank_loads() -> Iterator[None]:
    """Let each rank have its own weights of a model that is loaded meanwhile, whatever engine the run has: Transformers and
    load_base() go by this variable (distributed/fsdp.py: is_fsdp_enabled)."""
    said = os.environ.pop("ACCELERATE_USE_FSDP", None)
    try:
        yield
    finally:
        if said is not None:
            os.environ["ACCELERATE_USE_FSDP"] = said


def send_buffers_with_weights() -> None:
    """Give FSDP2's ranks also the buffers that the first one has loaded. What a state dict holds is taken for shards
    (utils/fsdp_utils.py:628), also buffers, which stay whole: DeepSeek-V3 and GLM-4-MoE keep their routers' biases there, and
    Gemma 4 a scale of each layer."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.tensor import DTensor

    send_weights = fsdp_utils.fsdp2_load_full_state_dict
    if hasattr(send_weights, "__wrapped__"):
        return

    @functools.wraps(send_weights)
    def send(accelerator: Any, model: Any, full_sd: dict[str, torch.Tensor], **options: Any) -> Any:
        buffers = {}
        for name, value in model.state_dict().items():
            of, _, name_there = name.rpartition(".")
            module = model.get_submodule(of)
            module = getattr(module, "_checkpoint_wrapped_module", module)  # which no state dict names
            if not isinstance(value, DTensor) and name_there in module._buffers:
                buffers[name] = (module, name_there, value)
                # Out of the state dict, until it is registered again.
                module._non_persistent_buffers_set.add(name_there)
        send_weights(accelerator, model, full_sd, **options)
        for name, (module, name_there, empty) in buffers.items():
            whole = full_sd[name] if accelerator.is_main_process else torch.empty_like(empty, device="cpu")
            whole = whole.to(accelerator.device)
            torch.distributed.broadcast(whole, src=0)
            module.register_buffer(name_there, whole)
        return model

    fsdp_utils.fsdp2_load_full_state_dict = send


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


def shard_before_layers(shard: Callable[[Any, dict[str, Any]], None]) -> None:
    """Call shard(model, fully_shard's options) on the next model that Accelerate prepares, once it has emptied it, and before it
    shards the layers (utils/fsdp_utils.py: fsdp2_prepare_model): it would shard all parts over the same ranks. It looks for which
    modules are layers at that very moment. What it does before and after stays: the weights of the first rank reach the others by
    each parameter's own placement. Of several calls the first shards first."""
    from accelerate import accelerator as caller
    from accelerate.utils import fsdp_utils

    prepare = caller.fsdp2_prepare_model

    def prepare_once(accelerator: Any, model: Any) -> Any:
        layers_of = fsdp_utils.fsdp2_prepare_auto_wrap_policy

        def shard_and_find_layers(plugin: Any, model: Any) -> Any:
            policy = plugin.mixed_precision_policy or torch.distributed.fsdp.MixedPrecisionPolicy()
            options = {"reshard_after_forward": plugin.reshard_after_forward, "offload_policy": plugin.cpu_offload}
            shard(model, options | {"mp_policy": policy})
            return layers_of(plugin, model)

        caller.fsdp2_prepare_model = prepare
        fsdp_utils.fsdp2_prepare_auto_wrap_policy = shard_and_find_layers
        try:
            return prepare(accelerator, model)
        finally:
            fsdp_utils.fsdp2_prepare_auto_wrap_policy = layers_of

    caller.fsdp2_prepare_model = prepare_once


def sum_at_once(mesh: Any, name: str) -> None:
    """Let DTensors sum over all dimensions of a mesh in one collective, and not in one for each dimension, with a warning
    (torch/distributed/tensor/_redistribute.py:390)."""
    mesh._flatten(name)


def hold_places(model: Any) -> None:
    """Memory on the CPU for parameters on the meta device, which nobody writes and the system therefore does not provide: by its
    addresses Accelerate finds an optimizer's parameters again once they are sharded (accelerator.py: _prepare_fsdp2)."""
    places: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                place = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                place = places.setdefault(id(parameter), place)
                module._parameters[name] = place
