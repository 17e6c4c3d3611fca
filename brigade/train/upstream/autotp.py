"""DeepSpeed's AutoTP: a vocabulary that it divides, and layers with adapters."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import TPLayerSpec


@contextmanager
def whole_logits(model: torch.nn.Module) -> Iterator[None]:
    """Let heads give all logits meanwhile, to choose among tokens by; a tied head has only those of its rank's tokens. The loss
    is computed from the parts (sequence/cross_entropy.py), so that training never holds the whole (module_inject/layers.py:
    VocabParallelLinear)."""
    from deepspeed.module_inject.layers import GatherFromTensorParallelRegion, VocabParallelLinear

    def gathered(head: torch.nn.Module, _: object, logits: torch.Tensor) -> torch.Tensor:
        return GatherFromTensorParallelRegion.apply(head.mp_group, logits, head._partition_sizes)

    heads = [module for module in model.modules() if isinstance(module, VocabParallelLinear)]
    hooks = [head.register_forward_hook(gathered) for head in heads]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def look_into_adapters() -> None:
    """Let AutoTP divide a base layer and its adapters, each by the plan. PEFT's layer shows its base's weight as its own, so that
    AutoTP makes one plain layer of all (module_inject/auto_tp.py: _replace_module)."""
    from deepspeed.module_inject.auto_tp import AutoTP

    replace = AutoTP._replace_with_config
    if hasattr(replace, "__wrapped__"):
        return

    @functools.wraps(replace)
    def look_inside(self: AutoTP, child: torch.nn.Module, name: str) -> torch.nn.Module:
        if not hasattr(child, "base_layer") and not hasattr(child, "modules_to_save"):
            return replace(self, child, name)
        outer, _, own = name.rpartition(".")
        self._replace_module(child, own, outer)
        return child

    AutoTP._replace_with_config = look_inside


def split_inputs() -> None:
    """Teach AutoTP `rowwise_split_input`, by which phi3, glm4 and olmo3 divide a matrix whose input is whole: it follows a
    projection whose output is gathered. AutoTP has such a layer only for output heads (module_inject/layers.py), and refuses
    plans that name the style (module_inject/tp_plan_converter.py). A module with such a layer sees all heads: their number stays.
    It refuses the styles of experts, too, which Gemma 4's plan has also where the model has none.
    """
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.layers import LinearAllreduceWithReplicatedInput
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    style = "rowwise_split_input"
    convert, create, update = TPPlanConverter.convert, AutoTP._create_row_parallel_layer, AutoTP.update_mp_params
    if hasattr(convert, "__wrapped__"):
        return

    @functools.wraps(convert)
    def convert_all(plan: Mapping[str, str] | None) -> list[TPLayerSpec] | None:
        dense = {name: each for name, each in (plan or {}).items() if "experts" not in name.split(".")}
        specs = convert({name: "rowwise" if each == style else each for name, each in dense.items()})
        for each, spec in zip(dense.values(), specs or (), strict=True):
            spec.splits_its_input = each == style
        return specs

    @functools.wraps(create)
    def create_row(self: AutoTP, module: torch.nn.Module, spec: TPLayerSpec, name: str) -> torch.nn.Module:
        if not getattr(spec, "splits_its_input", False):
            return create(self, module, spec, name)
        return LinearAllreduceWithReplicatedInput(module, self.mp_group, name=name, tp_meta=self.tp_meta)

    @functools.wraps(update)
    def update_numbers(self: AutoTP, child: torch.nn.Module, name: str | None = None) -> None:
        layers = (getattr(layer, "base_layer", layer) for layer in child.children())  # adapters have it inside
        if any(isinstance(layer, LinearAllreduceWithReplicatedInput) for layer in layers):
            child.replaced = True
        update(self, child, name)

    TPPlanConverter.convert = staticmethod(convert_all)
    AutoTP._create_row_parallel_layer, AutoTP.update_mp_params = create_row, update_numbers


def gather_buffers() -> None:
    """Let the state dict that DeepSpeed gathers of a divided model hold buffers too, which every rank has whole. Under ZeRO-3 it
    does (runtime/engine.py: _replace_module_consolidated_state_dict, _zero3_consolidated_16bit_state_dict)."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    gather = DeepSpeedEngine._replace_module_consolidated_state_dict
    if hasattr(gather, "__wrapped__"):
        return

    @functools.wraps(gather)
    def gather_all(self: DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
        state = gather(self)
        for of, module in self.module.named_modules() if state is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    state[f"{of}.{name}" if of else name] = buffer.detach().cpu()
        return state

    DeepSpeedEngine._replace_module_consolidated_state_dict = gather_all


def sum_gradients(model: torch.nn.Module, names: Collection[str]) -> None:
    """Sum the gradients of these parameters, or modules, over the tensor group: each rank has a part of them. Call it before the
    engine exists. AutoTP does it only for the weight of a module that Transformers' plan names, not for a bias or any other
    parameter, and skips those that are marked (module_inject/auto_tp.py: register_replicated_grad_hooks)."""
    import deepspeed.comm as dist
    from deepspeed.utils import groups

    def total(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=groups.get_tensor_model_parallel_group())
        return gradient

    for name, parameter in model.named_parameters():
        if name in names or name.rpartition(".")[0] in names:
            parameter._ds_grad_allreduce_registered = True  # a frozen one, too: it would ask for a hook that cannot be
            if parameter.requires_grad:
                parameter.register_hook(total)


# ---- Transformers' styles -------------------------------------------------------------------------------------------
# Transformers' styles of tensor parallelism, and layers that compute with no DTensors.
def compute_locally(linear: torch.nn.Module) -> None:
    """Let a style hand a layer this rank's values, and take them from it, as it does for quantised weights of its own
    (transformers, distributed/tensor_parallel.py: should_use_local_tensors)."""
    linear._hf_quantized_needs_local_tp = True


def give_plan(model: torch.nn.Module, plan: dict[str, str]) -> None:
    """Say what AutoTP divides, besides the plan of the model's config (deepspeed, runtime/tensor_parallel/config.py:
    _get_hf_tp_plan)."""
    model._tp_plan = plan
