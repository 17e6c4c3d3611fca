"""Accelerate's mesh for tensor groups beside data-parallel ranks that shard nothing."""

from accelerate import ParallelismConfig


class WithoutShards(ParallelismConfig):  # type: ignore[misc]
    """dp_shard_size 1 beside tensor groups: every group holds a whole model.

    Accelerate 1.15.0 refuses more than one such group (parallelism_config.py:336), and has no FSDP2 where the dimension that
    shards is not enabled. FSDP2 itself takes a dimension of one rank.
    """

    dp_shard_enabled = True

    def __post_init__(self) -> None:
        replicate = vars(self)["dp_replicate_size"]
        self.dp_replicate_size = 1
        super().__post_init__()
        self.dp_replicate_size = self._sizes["dp_replicate"] = replicate
