"""When DeepSpeed's ZeRO-3 releases the weights that it has gathered."""

import functools
import inspect
from typing import Any


@functools.cache
def decide_anew_after_each_change() -> None:
    """Let ZeRO-3 decide anew which weights to release, once modules run in another order than before.

    After a module's forward pass it keeps the weights that are needed again within stage3_max_reuse_distance elements, and
    remembers the decision in an lru_cache (runtime/zero/partitioned_param_coordinator.py:633), which it keeps when it throws the
    order of modules away. Those who evaluate before the first step, where nothing is needed again, would gather each weight
    twice in every micro-step for ever.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    decide = PartitionedParameterCoordinator.__dict__["_PartitionedParameterCoordinator__params_to_release"]
    decided = inspect.getclosurevars(decide).nonlocals["func"]  # instrument_w_nvtx keeps no __wrapped__
    clear = PartitionedParameterCoordinator._clear_trace_structures

    def clear_all(coordinator: Any) -> None:
        clear(coordinator)
        decided.cache_clear()

    PartitionedParameterCoordinator._clear_trace_structures = clear_all
