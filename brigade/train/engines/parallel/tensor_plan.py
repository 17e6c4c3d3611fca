"""Which modules and parameters of a model a tensor group divides or sums up, by Transformers' plan for the architecture."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Transformers' words for how a module is divided -> along which dimension of its weight.
WEIGHTS = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "colwise_rep": 0,
    "embedding_rowwise": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "rowwise_rep": 1,
}
NORMS = "replicated_with_grad_allreduce"  # a norm of each head, on a rank's own heads
# What adapters add to the names of a model's modules.
_WRAPPERS = re.compile(r"(original_module|modules_to_save\.[^.]+)(\.|$)")


def general(name: str) -> str:
    """Return the name of a module or parameter with a star for its layer, without the names of wrappers."""
    return ".".join("*" if part.isdigit() else part for part in _WRAPPERS.sub("", name).rstrip(".").split("."))


def plan_of(model: PreTrainedModel, summed: Collection[str]) -> dict[str, str]:
    """Return the style of each module that is divided, by its name in this model, which adapters may have wrapped; and NORMS for
    single parameters whose gradients are summed. All lie in the decoder and at its two ends.

    The one of an adapter's two small matrices that has the divided side is divided like its base: B of a colwise base, A of a
    rowwise one. The other is whole, and what it computes is the same on every rank.

    summed: of tensor_trial.summed()
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    styles = dict(base.tp_plan)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    plan: dict[str, str] = {}
    # A vision tower may have a plan of its own (Gemma 4's), and stays whole on each rank.
    reached = {id(module) for part in (base.get_decoder(), head, embedding) if part for module in part.modules()}
    for name, module in base.named_modules():
        if id(module) not in reached:
            continue
        style = styles.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style not in (*WEIGHTS, NORMS) or (
            head is not None and head.weight is embedding.weight and module in (head, embedding)
        ):
            continue
        if hasattr(module, "modules_to_save"):  # PEFT keeps the module beside the copy that it trains whole
            plan |= {
                f"{name}.{part}": style
                for part in ("original_module", *(f"modules_to_save.{key}" for key in module.modules_to_save))
            }
        elif hasattr(module, "base_layer"):
            plan[f"{name}.base_layer"] = style
            plan |= {f"{name}.lora_magnitude_vector.{key}": style for key in module.lora_magnitude_vector}
            divided = module.lora_B if WEIGHTS[style] == 0 else module.lora_A
            plan |= {f"{name}.{'lora_B' if WEIGHTS[style] == 0 else 'lora_A'}.{key}": style for key in divided}
        else:
            plan[name] = style
    decoder = base.get_decoder() if summed else None
    inside = next((f"{name}." for name, module in base.named_modules() if module is decoder), "")
    for name, _ in base.named_parameters():
        if summed and name.startswith(inside) and general(name.removeprefix(inside)) in summed:
            plan[name] = NORMS
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    return {prefix + name: style for name, style in plan.items()}
