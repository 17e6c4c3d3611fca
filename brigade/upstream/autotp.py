"""DeepSpeed's AutoTP where it divides the vocabulary: a tied head gives each rank the logits of its own tokens alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def whole_logits(model: Any) -> Iterator[None]:
    """Heads give all logits meanwhile, for who chooses among tokens. The loss is computed from the parts
    (sequence/cross_entropy.py), so that training never holds the whole (module_inject/layers.py: VocabParallelLinear)."""
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
