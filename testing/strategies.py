"""What tests of strategies share: the files of the repository, two configs to change, and worlds."""

import copy
import json
from typing import Any

from brigade.train.host.cluster import World

from .ranks import REPOSITORY
from .shipped import shipped

DS_CONFIGS = [path.name for path in shipped("ds_configs/*.json")]
ACCELERATE_CONFIGS = [path.name for path in shipped("accelerate_configs/*.yaml")]
ZERO3 = json.loads((REPOSITORY / "ds_configs/zero3.json").read_text())
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}


def world(size: int = 2) -> World:
    """So many ranks of this host."""
    return World(0, 0, size, size, "host", "python" if size == 1 else "torchrun")


def hsdp(replicate: int, shard: int) -> dict[str, Any]:
    """An accelerate config."""
    return {**FSDP2, "parallelism_config": {"dp_replicate_size": replicate, "dp_shard_size": shard}}


def changed(path: str, value: Any, base: dict[str, Any] = ZERO3) -> dict[str, Any]:
    """A ds_config with this value at a.b.c."""
    config = copy.deepcopy(base)
    *parents, key = path.split(".")
    block = config
    for name in parents:
        block = block.setdefault(name, {})
    block[key] = value
    return config
