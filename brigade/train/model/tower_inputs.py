"""A tower takes what readers made of its images (images/grids.py) as if its model had handed it on.

The model itself would hand it on to the language model, too, and engines would move to the device what is read on the host.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from . import parts

TOWER = "tower"  # the key of a micro-batch that holds it, which is not for the model
# The tower's keyword arguments for the images of this forward pass, where they were made.
MADE: ContextVar[Mapping[str, Any] | None] = ContextVar("MADE", default=None)


def take_over(model: Any) -> None:
    """Let the tower of a model take over what MADE says in each pass; it makes by itself what nobody has made.

    model: with adapters or without, before an engine wraps it
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    row = parts.row_of(whole.config)
    if row.get("grids") and hasattr(whole.config, "vision_config"):
        whole.get_submodule(row["tower"][0]).register_forward_pre_hook(_add, with_kwargs=True)


def _add(tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if (made := MADE.get()) is None:
        return None
    on_host = {name: torch.from_numpy(each) for name, each in made.items() if isinstance(each, np.ndarray)}
    return args, {**given, **made, **on_host}
