"""Mixtures of experts as Transformers holds them, and as ZeRO-3 gathers them."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import are_experts, peft_layers, replaced

if TYPE_CHECKING:  # plan asks here which layers PEFT takes for experts, and does without torch
    import torch
    from transformers import PreTrainedConfig
    from transformers.utils.output_capturing import OutputRecorder


def gather_whole(module: torch.nn.Module) -> None:
    """Let ZeRO-3 gather all of a module's parameters before it computes, and none by its parts: a part that is
    called more often on one rank than on others would wait for them (deepspeed/utils/z3_leaf_module.py: _z3_leaf).

    ZeRO-3 then takes the module's gradients for complete once that of an input is (runtime/zero/stage3.py:
    reduce_leaf_module_grads), and torch looks only at inputs without a name (torch/nn/modules/module.py: BackwardHook)."""
    import torch

    module._z3_leaf = True
    first = [*inspect.signature(type(module).forward).parameters][1]

    def name_none(
        _: object, args: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        given = dict(given)
        hidden, *others = args or (given.pop(first),)
        alone = torch.is_grad_enabled() and not hidden.requires_grad  # a first layer's, on a frozen embedding
        if alone and any(hasattr(parameter, "ds_tensor") for parameter in module.parameters()):
            hidden = hidden.detach().requires_grad_()
        return (hidden, *others), given

    module.register_forward_pre_hook(name_none, with_kwargs=True)


def computes_gradients() -> bool:
    """Whether this thread computes gradients (torch/autograd/graph.py): whatever passes forward is then computed again."""
    import torch

    return torch._C._current_graph_task_id() != -1


def half_of(device_type: str) -> torch.dtype | None:
    """The half type in which autocast computes products on such a device at the moment, or None."""
    import torch

    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class _InHalf:
    """Experts as their forward pass sees them, with weights and biases cast where it asks for them."""

    def __init__(self, experts: torch.nn.Module, half: torch.dtype) -> None:
        self._experts, self._half = experts, half

    def __getattr__(self, name: str) -> Any:
        import torch

        value = getattr(self._experts, name)
        return value.to(self._half) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def compute_as_autocast_says() -> None:
    """Let fused experts compute in autocast's half type, as linear layers do: torch's grouped product is no autocast operation,
    and Transformers casts its input to the weights' dtype, which is fp32 there (integrations/moe.py: _grouped_mm,
    pytorch/pytorch#174763). An H100 multiplies fp32 at a tenth of the speed."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    def forward(
        experts: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        half = half_of(hidden_states.device.type)
        if half is None:
            return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        output = grouped_mm_experts_forward(_InHalf(experts, half), hidden_states.to(half), top_k_index, top_k_weights)
        return output.to(hidden_states.dtype)

    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", forward)  # under its own name, by which generate() takes another one


def taken_for_experts(model: torch.nn.Module, layers: list[str]) -> set[str]:
    """Last parts of the names in `layers` that PEFT takes for the fused experts', wherever such a layer stands: in
    DeepSeek-V3 gate_proj, up_proj, down_proj of shared experts and dense layers too (utils/transformers_weight_conversion.py:
    _convert_peft_config_moe). It does so again when it loads adapters, so that none can be kept on these layers."""
    peft = peft_layers.import_peft()
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def taken(name: str) -> bool:
        config = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it wants the other half of a fused weight
            return True
        return bool(config.target_parameters)

    return {name for name in {layer.rpartition(".")[2] for layer in layers} if taken(name)}


# Arguments of Transformers' load_balancing_loss_func where it is what loss/router_loss.py computes; Doge's has other ones.
_OF_BALANCE = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balances(config: PreTrainedConfig) -> bool:
    """Whether Transformers adds to this config's model, where asked, the loss of Switch Transformers over all its routers."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if not hasattr(text, "router_aux_loss_coef") or type(text) not in AutoModelForCausalLM._model_mapping:
        return False
    model = AutoModelForCausalLM._model_mapping[type(text)]
    loss = getattr(sys.modules[model.__module__], "load_balancing_loss_func", None)
    return loss is not None and [*inspect.signature(loss).parameters] == _OF_BALANCE and bool(_recorders(model))


def routers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """The modules of a model whose outputs Transformers records as router_logits, and which output of each that is
    (utils/output_capturing.py: OutputRecorder)."""
    modules = dict(model.named_modules())
    recorders = next(filter(None, (_recorders(type(module)) for module in modules.values())), [])
    return [
        (module, recorder.index)
        for name, module in modules.items()
        for recorder in recorders
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
    ]


def _recorders(kind: type) -> list[OutputRecorder]:
    found = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits", [])
    return found if isinstance(found, list) else [found]


# What routers add to their scores, only to choose by them (DeepSeek-V3's; AFMoE and LFM2-MoE have the second name for it).
_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class RoutingBias:
    """One mixture layer's bias, which a module holds as a buffer or as a parameter that nobody trains.

    experts: the layer's fused experts, each of which it has a number for; None where it has others (LongCat-Flash's experts that
        compute nothing), or the experts are not fused
    """

    owner: Any
    name: str
    experts: Any

    @property
    def tensor(self) -> torch.Tensor:
        """The bias as it is now: (experts), or (1, experts) of ERNIE 4.5."""
        return getattr(self.owner, self.name)  # type: ignore[no-any-return]

    @property
    def is_parameter(self) -> bool:
        return self.name in self.owner._parameters

    def become_buffer(self) -> None:
        """Hold the bias as a buffer in fp32, which no engine shards or casts. Its name in a state dict stays."""
        bias = self.tensor.detach().float()
        self.owner._parameters.pop(self.name, None)
        self.owner.register_buffer(self.name, bias)


def routing_biases(model: torch.nn.Module) -> list[RoutingBias]:
    """Return the routing biases of a model that no engine has wrapped yet, in the order of its layers.

    In all models of Transformers that have one, the experts with the largest scores plus bias are chosen.
    """
    modules = dict(model.named_modules())
    return [
        RoutingBias(owner, name, _chosen_by(modules, path, bias.numel()))
        for path, owner in modules.items()
        for name in _BIASES
        if (bias := (owner._parameters | owner._buffers).get(name)) is not None
    ]


def _chosen_by(modules: dict[str, torch.nn.Module], path: str, number: int) -> torch.Tensor:
    """Return the fused experts in the smallest module around `path` that has any, if they are these `number`."""
    found: list[Any] = []
    while not (found := [module for module in modules[path].modules() if are_experts(module)]) and path:
        path = path.rpartition(".")[0]
    return found[0] if len(found) == 1 and found[0].num_experts == number else None


def biases_in_fp32() -> AbstractContextManager[None]:
    """Load routing biases in fp32 here, whatever the model's dtype: most classes say so themselves, and those of MiniMax-M2, Kimi
    Linear, AFMoE and Laguna do not (modeling_utils.py: _keep_in_fp32_modules_strict)."""
    from transformers import PreTrainedModel

    kept = PreTrainedModel._keep_in_fp32_modules_strict or ()
    return replaced(PreTrainedModel, _keep_in_fp32_modules_strict=[*kept, *_BIASES])


_READ_PAST = re.compile(r"self\.(\w+)\.weight\b")


def beside_mamba(model: torch.nn.Module, layers: list[str]) -> set[str]:
    """Return those last parts of the names in `layers` on which no adapter can be in a model with Mamba's layers, whose kernels
    read these weights past the module: PEFT refuses some of them for some models (tuners/tuners_utils.py:
    _check_lora_target_modules_mamba), and not for others whose layers hand out_proj's weight to mamba-ssm's function of all
    in one (Bamba, Granite 4's hybrids), nor dt_proj, whose weight Mamba-1's layers multiply themselves (Mamba, Jamba)."""
    peft = peft_layers.import_peft()
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    def refused(name: str) -> bool:
        try:
            _check_lora_target_modules_mamba(peft.LoraConfig(), model, name)
        except ValueError:
            return True
        return False

    mixers = {type(module) for module in model.modules() if hasattr(module, "conv1d")}
    past = {name for mixer in mixers for name in _READ_PAST.findall(inspect.getsource(mixer))}
    return {name for name in {layer.rpartition(".")[2] for layer in layers} if name in past or refused(name)}
