"""Mixtures of experts as Transformers holds them, and as ZeRO-3 gathers them."""

from typing import Any


def gather_whole(module: Any) -> None:
    """Where ZeRO-3 shards it, all of a module's parameters are gathered before it computes, and none by its parts: a part that is
    called more often on one rank than on others would wait for them (deepspeed/utils/z3_leaf_module.py: _z3_leaf)."""
    module._z3_leaf = True


def replace_gate(experts: Any, gate: Any) -> None:
    """Fused experts compute `gate(both)`, where they have no gate of their own as gpt-oss has (integrations/moe.py)."""
    from transformers.integrations.moe import _default_apply_gate

    if getattr(type(experts), "_apply_gate", None) is _default_apply_gate:
        experts._apply_gate = gate
