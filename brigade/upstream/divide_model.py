"""Tensor parallelism inside of Accelerate's FSDP2: a model is divided once it is on the meta device, and before it is sharded."""

import functools
from collections.abc import Callable
from typing import Any


def before_sharding(divide: Callable[[Any], None]) -> None:
    """Call divide(model) with each model that Accelerate is about to shard. It has taken the weights out of it by then, and sends
    them into the shards afterwards (utils/fsdp_utils.py: fsdp2_prepare_model). This is the last that it asks before it shards."""
    from accelerate.utils import fsdp_utils

    policy = getattr(
        fsdp_utils.fsdp2_prepare_auto_wrap_policy, "__wrapped__", fsdp_utils.fsdp2_prepare_auto_wrap_policy
    )

    @functools.wraps(policy)
    def asked(plugin: Any, model: Any) -> Any:
        divide(model)
        return policy(plugin, model)

    fsdp_utils.fsdp2_prepare_auto_wrap_policy = asked
