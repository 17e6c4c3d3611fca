"""How Transformers loads the files of a model: which weight takes which tensor, and one weight after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import replaced, variables

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


# ---- names of weights -----------------------------------------------------------------------------------------------
# Which weight of a model takes a tensor of its files: Transformers renames and fuses tensors while it loads
# (core_model_loading.py: convert_and_load_state_dict_in_model).
def takers(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str | None]:
    """Return name of a tensor -> name of the parameter or buffer that takes it, the first of several; None where none does.

    model: may be on the meta device
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    own, prefix = model.state_dict(), model.base_model_prefix
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    taken: dict[str, str | None] = {}
    for name in names:
        renamed = rename_source_key(name, renamings, converters, prefix, own)[0]
        if renamed not in own:  # a name that a pattern meets by accident
            renamed = rename_source_key(name, [], [], prefix, own)[0]
        taken[name] = renamed if renamed in own else None
    return taken


# ---- one weight after another ---------------------------------------------------------------------------------------
# Transformers' reading of a model's files, all its conversions among it, without a place for the whole model.
@contextmanager
def handed_to(take: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Let from_pretrained hand each weight to take(name, tensor) meanwhile, in place of the model, which stays on the meta device
    (core_model_loading.py: set_param_for_module). One is read after the other: threads would read ahead of what is taken."""
    from transformers import core_model_loading as loading

    plain = loading.set_param_for_module

    def hand_over(
        model: torch.nn.Module, target_name: str, value: torch.Tensor, loading_info: Any, hf_quantizer: object
    ) -> None:
        owner, _, name = target_name.rpartition(".")
        empty = getattr(model.get_submodule(owner), name, None)
        if empty is None or empty.shape != value.shape:  # it knows what to say
            plain(model, target_name, value, loading_info, hf_quantizer)
            return
        loading_info.missing_keys.discard(target_name)
        empty._is_hf_initialized = True
        take(target_name, value)

    with replaced(loading, set_param_for_module=hand_over), variables(HF_DEACTIVATE_ASYNC_LOAD="1"):
        yield
