"""Which gathered weights DeepSpeed's ZeRO-3 releases after a module's pass."""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator


PREFIX = "_PartitionedParameterCoordinator__"  # of its private attributes


@functools.cache
def decide_by_the_present_order() -> None:
    """Let ZeRO-3 decide which weights to release by the order in which modules run now.

    It keeps those that are needed again within stage3_max_reuse_distance elements, and remembers each decision in an lru_cache
    even after modules have run in another order (runtime/zero/partitioned_param_coordinator.py: __params_to_release). Who
    evaluates before the first step, where nothing is needed again, would gather each weight twice in every micro-step for ever.
    And each decision walks through all modules that follow: for a model with adapters that is tens of seconds in all.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    setattr(PartitionedParameterCoordinator, PREFIX + "params_to_release", _params_to_release)


def _params_to_release(coordinator: PartitionedParameterCoordinator, module: torch.nn.Module, step: int) -> set[int]:
    """Return the ds_ids of the module's parameters that nobody needs soon.

    step: how many modules have run before and with this one, since the forward pass began
    """
    uses = getattr(coordinator, "brigade_uses", None)
    order = getattr(coordinator, PREFIX + "submodule_order")
    if uses is None or uses.order is not order:
        uses = coordinator.brigade_uses = _Uses(order, getattr(coordinator, PREFIX + "max_reuse_dist_in_numel"))
    decided = uses.decided.get((module.ds_id, step))
    if decided is None:
        fetched = getattr(coordinator, PREFIX + "most_recent_step_id_param_fetched_for")
        # A use that the prefetcher has skipped, because the weight was there, would not be prefetched any more.
        mine = [each for each in _parameters(module) if not each.ds_persist and fetched[each] <= step]
        decided = uses.decided[module.ds_id, step] = {each.ds_id for each in mine if not uses.soon(each.ds_id, step)}
    return set(decided)  # DeepSpeed adds to it


def is_kept(parameter: torch.nn.Parameter) -> bool:
    """Whether ZeRO-3 keeps this parameter whole on each rank between steps, and has it there now
    (partition_parameters.py: ds_persist)."""
    return bool(parameter.ds_persist) and parameter.ds_status.name == "AVAILABLE"


class _Uses:
    """Where in an order of modules each parameter is used, and what has been decided by it."""

    def __init__(self, order: tuple[torch.nn.Module, ...], distance: int) -> None:
        self.order, self.distance = order, distance
        self.decided: dict[tuple[int, int], set[int]] = {}
        self.steps: dict[int, list[int]] = {}
        elements = []
        for step, module in enumerate(order):
            parameters = _parameters(module)
            elements.append(sum(each.ds_numel for each in parameters))
            for each in parameters:
                self.steps.setdefault(each.ds_id, []).append(step)
        self.before = list(itertools.accumulate(elements, initial=0))  # elements of the modules before each step

    def soon(self, parameter: int, step: int) -> bool:
        """Whether a parameter is used from this step on, before so many elements as the distance have been."""
        steps = self.steps.get(parameter, [])
        place = bisect.bisect_left(steps, step)
        return place < len(steps) and self.before[steps[place]] - self.before[step] < self.distance


def _parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
    from deepspeed.utils import z3_leaf_module

    return list(iter_params(module, recurse=z3_leaf_module(module)))
