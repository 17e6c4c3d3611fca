"""DeepSpeed's AutoTP: a vocabulary that it divides, and layers with adapters."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def whole_logits(model: Any) -> Iterator[None]:
    """Heads give all logits meanwhile, for who chooses among tokens; a tied one has those of its rank's tokens alone. The loss is
    computed from the parts (sequence/cross_entropy.py), so that training never holds the whole (module_inject/layers.py:
    VocabParallelLinear)."""
    from deepspeed.module_inject.layers import GatherFromTensorParallelRegion, VocabParallelLinear

    def gathered(head: Any, _: Any, logits: Any) -> Any:
        return GatherFromTensorParallelRegion.apply(head.mp_group, logits, head._partition_sizes)

    heads = [module for module in model.modules() if isinstance(module, VocabParallelLinear)]
    hooks = [head.register_forward_hook(gathered) for head in heads]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def look_into_adapters() -> None:
    """Let AutoTP divide a base layer and its adapters, each by the plan. PEFT's layer shows its base's weight as its own, so that
    AutoTP makes one plain layer of all (module_inject/auto_tp.py: _replace_module)."""
    from deepspeed.module_inject.auto_tp import AutoTP

    replace = AutoTP._replace_with_config
    if hasattr(replace, "__wrapped__"):
        return

    @functools.wraps(replace)
    def look_inside(self: Any, child: Any, name: str) -> Any:
        if not hasattr(child, "base_layer") and not hasattr(child, "modules_to_save"):
            return replace(self, child, name)
        outer, _, own = name.rpartition(".")
        self._replace_module(child, own, outer)
        return child

    AutoTP._replace_with_config = look_inside
