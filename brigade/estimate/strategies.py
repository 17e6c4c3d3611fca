"""The strategies that train.py runs, as the planner sees them: what they shard, what they offload, and which file names them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One strategy.

    engine, stage: as of a Job; group: "node" where states are sharded inside a node and replicated across
    offload: what lies in the host's memory ("optimizer", or "all": parameters too) or on its disks ("nvme")
    file: the ds_config; "" for DDP, "fsdp2" and "hsdp" where an accelerate config says it
    inside: "tensor", "expert" or "context": what a node's GPUs divide among them; pipeline: each node is a stage
    rank: how much there is to understand and to go wrong; of two that are about as fast the planner takes the lower
    """

    name: str
    engine: str
    stage: int
    file: str
    rank: int
    group: str = ""
    offload: str = ""
    inside: str = ""
    pipeline: bool = False

    @property
    def only(self) -> bool:
        """Estimated, but not run by train.py."""
        return bool(self.inside) or self.pipeline


CHOICES = (
    Choice("DDP", "ddp", 0, "", 0),
    Choice("ZeRO-1", "zero", 1, "ds_configs/zero1.json", 1),
    Choice("ZeRO-2", "zero", 2, "ds_configs/zero2.json", 1),
    Choice("FSDP2", "fsdp2", 3, "fsdp2", 2),
    Choice("ZeRO-3", "zero", 3, "ds_configs/zero3.json", 2),
    Choice("HSDP", "fsdp2", 3, "hsdp", 3, group="node"),
    Choice("ZeRO-3 hpZ", "zero", 3, "ds_configs/zero3_hpz.json", 4, group="node"),
    Choice("ZeRO-2 offload", "zero", 2, "ds_configs/zero2_offload.json", 5, offload="optimizer"),
    Choice("ZeRO-3 offload", "zero", 3, "ds_configs/zero3_offload.json", 6, offload="optimizer"),
    Choice("ZeRO-3 offload all", "zero", 3, "ds_configs/zero3_offload_param.json", 7, offload="all"),
    Choice("ZeRO-3 NVMe", "zero", 3, "ds_configs/zero3_nvme.json", 8, offload="nvme"),
    Choice("TP x FSDP2", "fsdp2", 3, "", 9, inside="tensor"),
    Choice("EP x FSDP2", "fsdp2", 3, "", 9, inside="expert"),
    Choice("CP x FSDP2", "fsdp2", 3, "", 9, inside="context"),
    Choice("TP x PP x ZeRO-1", "megatron", 1, "", 9, inside="tensor", pipeline=True),
)  # fmt: skip
