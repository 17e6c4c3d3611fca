"""Adapters, switched off for a while without a change of what is trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_OFF = "_disable_adapters"


def layers(model: Any) -> list[Any]:
    """Return the modules of a model that have adapters, or a trained copy beside the original (peft/tuners/tuners_utils.py:
    BaseTunerLayer; peft/utils/other.py: AuxiliaryTrainingWrapper)."""
    return [module for module in model.modules() if hasattr(module, _OFF)]


@contextmanager
def switched_off(layers: Sequence[Any]) -> Iterator[None]:
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
