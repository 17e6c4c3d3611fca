"""The strategies of train.py and of others, as the planner sees them: what they shard and offload, and which file names them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import UserError, did_you_mean


@dataclass(frozen=True)
class Choice:
    """One strategy.

    engine, stage: as of a Job; group: "node" where states are sharded inside a node and replicated across
    offload: what lies in the host's memory ("optimizer", or "all": parameters too) or on its disks ("nvme")
    file: the ds_config; "" for DDP, "fsdp2" and "hsdp" where an accelerate config says it
    inside: "tensor", "expert" or "context": what a node's GPUs divide among them; pipeline: each node is a stage
    quantised: what it sends is rounded to 8 and 4 bits
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
    quantised: bool = False

    @property
    def key(self) -> str:
        """As a flag names it: its file's name without the ending, as in a run's directory, or the name in small letters."""
        file = self.file.rpartition("/")[2].removesuffix(".json")
        return file or "_".join(re.findall(r"[a-z0-9]+", self.name.lower()))

    @property
    def only(self) -> bool:
        """Estimated, but not chosen."""
        return bool(self.why_only)

    @property
    def why_only(self) -> str:
        if self.quantised:
            return "it rounds what it sends, which no GPU has tried here"
        return "train.py does not run it" if self.inside or self.pipeline else ""


CHOICES = (
    Choice("DDP", "ddp", 0, "", 0),
    Choice("ZeRO-1", "zero", 1, "ds_configs/zero1.json", 1),
    Choice("ZeRO-2", "zero", 2, "ds_configs/zero2.json", 1),
    Choice("FSDP2", "fsdp2", 3, "fsdp2", 2),
    Choice("ZeRO-3", "zero", 3, "ds_configs/zero3.json", 2),
    Choice("HSDP", "fsdp2", 3, "hsdp", 3, group="node"),
    Choice("ZeRO-3 hpZ", "zero", 3, "ds_configs/zero3_hpz.json", 4, group="node"),
    Choice("ZeRO++", "zero", 3, "ds_configs/zeropp.json", 5, group="node", quantised=True),
    Choice("ZeRO-2 offload", "zero", 2, "ds_configs/zero2_offload.json", 5, offload="optimizer"),
    Choice("ZeRO-3 offload", "zero", 3, "ds_configs/zero3_offload.json", 6, offload="optimizer"),
    Choice("ZeRO-3 offload all", "zero", 3, "ds_configs/zero3_offload_param.json", 7, offload="all"),
    Choice("ZeRO-3 NVMe", "zero", 3, "ds_configs/zero3_nvme.json", 8, offload="nvme"),
    Choice("TP x FSDP2", "fsdp2", 3, "", 9, inside="tensor"),
    Choice("EP x FSDP2", "fsdp2", 3, "", 9, inside="expert"),
    Choice("CP x FSDP2", "fsdp2", 3, "", 9, inside="context"),
    Choice("TP x PP x ZeRO-1", "megatron", 1, "", 9, inside="tensor", pipeline=True),
)  # fmt: skip


def takes(choice: Choice, optimizer: str) -> bool:
    """Whether train.py runs that optimizer under it (strategy/__init__.py): some need whole parameters, some know no DTensors."""
    if choice.engine == "zero":
        return optimizer not in ("lamb", "lars")
    return not (choice.engine == "fsdp2" and optimizer.endswith("8bit"))


def named(words: Iterable[str], optimizer: str) -> tuple[Choice, ...]:
    """The strategies of those names (`zero3`, `ZeRO-3`, `ds_configs/zero3.json`), or all, less those without that optimizer.

    Raises UserError for an unknown name, or where none is left.
    """
    keys = {name.lower(): choice for choice in CHOICES for name in (choice.key, choice.name, choice.file or choice.key)}
    words = list(words)
    if unknown := [word for word in words if word.lower() not in keys]:
        raise UserError(
            "flag --strategy", f"{unknown[0]!r} is none", did_you_mean(unknown[0], [choice.key for choice in CHOICES])
        )
    asked = [keys[word.lower()] for word in words] or CHOICES
    if found := tuple(dict.fromkeys(choice for choice in asked if takes(choice, optimizer))):
        return found
    raise UserError(
        "flag --optim",
        f"train.py does not run {optimizer} under {' or '.join(choice.name for choice in asked)}",
        "use adamw_torch_fused, or another strategy",
    )
