"""Whether weights are finite, when they have been loaded and after a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...errors import UserError
from ..distributed import ranks

if TYPE_CHECKING:
    import torch


AGAIN = "download or copy the model again"


def check_finite(model: torch.nn.Module, source: str) -> None:
    """Raise UserError on all ranks where any of them has loaded a weight that is NaN or infinite. A collective.

    model: None on a rank whose weights come from another
    """
    names = ranks.gather(first_not_finite(model, trained=False) if model is not None else None)
    name = next(filter(None, names), None)
    if name:
        problem = f"the weight {name} holds NaN or infinity"
        raise UserError(source, problem, f"{AGAIN}; what it was trained into is lost")


def first_not_finite(model: torch.nn.Module, trained: bool = True) -> str | None:
    """Return the name of the first parameter (of those that are trained, or of all) whose part on this rank is not finite, or
    None.

    Weights in 4 bits are left out: the bits in their containers are no numbers.
    """
    for name, parameter in model.named_parameters():
        number = parameter.is_floating_point() and not hasattr(parameter, "quant_state")
        if number and parameter.requires_grad >= trained:
            part = own_part(parameter).detach()
            # One pass, and no second tensor of its size: NaN and infinity both end up in the extremes.
            if part.numel() and not all(map(math.isfinite, map(float, part.aminmax()))):
                return name
    return None


def own_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return what this rank has of a parameter: under ZeRO-3 and FSDP2 a part of it."""
    if hasattr(parameter, "ds_tensor"):
        from ..upstream import zero_shares

        return zero_shares.own_part(parameter)
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
