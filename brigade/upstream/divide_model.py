"""Tensor parallelism inside of Accelerate's FSDP2: a model is divided once it is on the meta device, and before it is sharded."""

import functools
from collections.abc import Callable
from typing import Any


def before_sharding(divide: Callable[[Any], None]) -> None:
    """Call divide(model) with each model that Accelerate is about to shard.

    By then it has taken the weights out of the model, and sends them into the shards afterwards. The last that it asks for before
    it shards is which modules to wrap (utils/fsdp_utils.py: fsdp2_prepare_model). Activation checkpointing asks for that, too,
    but earlier.
    """
    from accelerate import accelerator
    from accelerate.utils import fsdp_utils

    shard = getattr(accelerator.fsdp2_prepare_model, "__wrapped__", accelerator.fsdp2_prepare_model)

    @functools.wraps(shard)
    def divided(*args: Any, **options: Any) -> Any:
        policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy

        def asked(plugin: Any, model: Any) -> Any:
            divide(model)
            return policy(plugin, model)

        fsdp_utils.fsdp2_prepare_auto_wrap_policy = asked
        try:
            return shard(*args, **options)
        finally:
            fsdp_utils.fsdp2_prepare_auto_wrap_policy = policy

    accelerator.fsdp2_prepare_model = divided
