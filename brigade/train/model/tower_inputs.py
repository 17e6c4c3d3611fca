"""A tower takes what readers made of its images (model/images/grids.py) as if its model had handed it on.

The model itself would hand it on to the language model, too, and engines would move to the device what is read on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..distributed.process import this_process
from . import parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOWER = "tower"  # the key of a micro-batch that holds it, which is not for the model


def take_over(model: PreTrainedModel) -> None:
    """Let the tower of a model take what is told of each pass (ForwardPass.of_tower); it makes itself what nobody has made.

    model: with adapters or without, before an engine wraps it
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    row = parts.row_of(whole.config)
    if row.get("grids") and hasattr(whole.config, "vision_config"):
        whole.get_submodule(row["tower"][0]).register_forward_pre_hook(_add, with_kwargs=True)


def _add(
    tower: torch.nn.Module, args: tuple[object, ...], given: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    made = this_process.forward_pass.of_tower
    if made is None:
        return None
    on_host = {name: torch.from_numpy(each) for name, each in made.items() if isinstance(each, np.ndarray)}
    return args, {**given, **made, **on_host}
