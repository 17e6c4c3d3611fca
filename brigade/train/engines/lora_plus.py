"""LoRA+ (arXiv 2402.12354): groups of the optimizer in which the matrices B of adapters have a rate of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# In the names of parameters. PEFT's create_loraplus_optimizer counts DoRA's magnitudes to them too (peft/optimizers/loraplus.py).
FASTER = ("lora_B", "lora_embedding_B", "lora_magnitude_vector")


def learns_faster(name: str) -> bool:
    """Whether a parameter is one of those that loraplus_lr_ratio is for."""
    return any(part in FASTER for part in name.split("."))


def divide_groups(optimizer: torch.optim.Optimizer, model: torch.nn.Module, ratio: float) -> None:
    """Divide an optimizer's parameter groups in two: the rest as it was, and behind all of these what learns faster, at `ratio`
    times its group's rate. Whatever has divided them before, order() is this order.

    optimizer: one that has made no step
    """
    faster = {id(parameter) for name, parameter in model.named_parameters() if learns_faster(name)}
    slow, fast = list[dict[str, Any]](), list[dict[str, Any]]()
    for group in optimizer.param_groups:
        for is_fast, groups in ((False, slow), (True, fast)):
            members = [parameter for parameter in group["params"] if (id(parameter) in faster) is is_fast]
            if members:
                groups.append({**group, "params": members, "lr": group["lr"] * (ratio if is_fast else 1)})
    optimizer.param_groups[:] = slow + fast


def order(names: list[str]) -> list[str]:
    """Return names of parameters as divide_groups() orders them, of names in the order before it."""
    return sorted(names, key=learns_faster)  # stable
