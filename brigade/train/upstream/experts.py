"""Mixtures of experts as Transformers holds them, and as ZeRO-3 gathers them."""

from typing import Any


def gather_whole(module: Any) -> None:
    """Let ZeRO-3 gather all of a module's parameters before it computes, and none by its parts: a part that is
    called more often on one rank than on others would wait for them (deepspeed/utils/z3_leaf_module.py: _z3_leaf)."""
    module._z3_leaf = True


def replace_gate(experts: Any, gate: Any) -> None:
    """Fused experts compute `gate(both)`, where they have no gate of their own as gpt-oss has (integrations/moe.py)."""
    from transformers.integrations.moe import _default_apply_gate

    if getattr(type(experts), "_apply_gate", None) is _default_apply_gate:
        experts._apply_gate = gate


def taken_for_experts(model: Any, layers: list[str]) -> set[str]:
    """Last parts of the names in `layers` that PEFT 0.21.2 takes for the fused experts', wherever such a layer stands: in
    DeepSeek-V3 gate_proj, up_proj, down_proj of shared experts and dense layers too (utils/transformers_weight_conversion.py:
    _convert_peft_config_moe). It does so again when it loads adapters, so that none can be kept on these layers."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def taken(name: str) -> bool:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it wants the other half of a fused weight
            return True
        return bool(config.target_parameters)

    return {name for name in {layer.rpartition(".")[2] for layer in layers} if taken(name)}
