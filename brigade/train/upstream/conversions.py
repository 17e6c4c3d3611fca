"""Which weight of a model takes a tensor of its files: Transformers renames and fuses tensors while it loads (5.23,
core_model_loading.py: convert_and_load_state_dict_in_model)."""

from collections.abc import Iterable
from typing import Any


def takers(model: Any, names: Iterable[str]) -> dict[str, str | None]:
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
