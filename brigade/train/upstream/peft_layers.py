"""Adapters: put on a model without bitsandbytes, and switched off for a while without a change of what is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import quick_imports

if TYPE_CHECKING:
    import torch


_OFF = "_disable_adapters"


def import_peft() -> ModuleType:
    """Return PEFT, which imports bitsandbytes no sooner than somebody else does.

    To give a layer adapters it would import it, and with it torch's inductor, to ask whether the layer is one of theirs
    (tuners/lora/model.py: _create_new_module). Where nobody has imported it, no layer is.
    """
    with quick_imports():
        import peft
        from peft.tuners.lora import model

    lora: Any = model
    lora.is_bnb_available = lora.is_bnb_4bit_available = lambda: "bitsandbytes" in sys.modules
    return peft


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model that have adapters, or a trained copy beside the original (peft/tuners/tuners_utils.py:
    BaseTunerLayer; peft/utils/other.py: AuxiliaryTrainingWrapper)."""
    return [module for module in model.modules() if hasattr(module, _OFF)]


@contextmanager
def switched_off(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let these modules compute what they did before they got adapters.

    PEFT's own disable_adapter() also takes requires_grad away meanwhile: FSDP2 would choose its dtypes by what is trained at its
    first forward pass (_fsdp_param_group.py: _init_mp_dtypes), and find nothing.
    """
    for module in layers:
        setattr(module, _OFF, True)
    try:
        yield
    finally:
        for module in layers:
            setattr(module, _OFF, False)
