"""How one run's parameters, gradients and optimizer states lie on its ranks."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors.tables import Fields
from ..host.cluster import World
from .accelerate_config import FSDP_KEYS
from .axes import NONE, Axes, without
from .axis_keys import DS_KEYS, MESH_KEYS, as_mesh

LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # which `accelerate launch` sets in every process that it starts
Kind = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"]


@dataclass(frozen=True)
class Strategy:
    """How one run's parameters, gradients and optimizer states lie on its ranks.

    kind: what is sharded: nothing (single, ddp), optimizer states (zero1), and gradients (zero2), and parameters
        (zero3, fsdp2; hsdp shards within groups of `shard` ranks and replicates over `replicate` of them)
    name: short, for the output directory: a ds_config's file name, or the kind
    source: where that stands: "flag --ds_config ds_configs/zero3.json", "accelerate launch", ...
    ds_config: DeepSpeed's configuration with its "auto"s, or None
    fsdp: options of TrainingArguments.fsdp_config
    axes: what it divides besides the data
    replicas: worlds of ranks that train by themselves and meet every sync_every steps; all else here speaks of one of them. Where
        they are HSDP's groups, kind is fsdp2, and replicate stays their number
    overridden: a line where the launcher's environment has replaced the recipe's own
    """

    kind: Kind
    name: str
    source: str
    ds_config: dict[str, Any] | None = None
    fsdp: dict[str, Any] = field(default_factory=dict)
    replicate: int = 1
    shard: int = 1
    axes: Axes = NONE
    replicas: int = 1
    overridden: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_deepspeed(self) -> bool:
        return self.ds_config is not None

    @property
    def is_fsdp(self) -> bool:
        return self.kind in ("fsdp2", "hsdp")

    def shards(self, world_size: int) -> int:
        """Over how many of a replica's ranks FSDP2 shards each parameter, or what a rank of a tensor group has of it; else 1."""
        if not self.is_fsdp or self.axes.stages > 1:
            return 1
        groups = self.replicate if self.kind == "hsdp" else 1
        return max(1, world_size // groups // self.axes.tensor)

    @property
    def writes_in_parts(self) -> str:
        """The strategy's name where every host writes a part of each checkpoint, "" where one host writes the whole."""
        in_whole = self.axes.stages == 1 and not self.axes.divides_layers
        return "" if self.kind in ("single", "ddp") and in_whole else self.name

    @property
    def label(self) -> str:
        """The strategy's name and axes, for a reader: `fsdp2 x expert 2`."""
        return f"{self.name} x {self.axes}" if self.axes else self.name

    def place(self, *keys: str) -> str:
        """The place of the first of these that is an axis, for a message."""
        names = DS_KEYS if self.is_deepspeed else {axis: f"parallelism_config_{key}" for axis, key in MESH_KEYS.items()}
        return f"{self.source}: {next(names[key] for key in keys if key in names)}"

    def as_cluster(self) -> Fields:
        """Return this strategy as values of a recipe's `cluster:` section, without reference to any file."""
        document: dict[str, Any] = {}
        if self.is_fsdp:
            options = {FSDP_KEYS[key]: value for key, value in self.fsdp.items()}
            document = {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, **options},
                "parallelism_config": {"dp_replicate_size": self.replicate, "dp_shard_size": self.shard},
            }
        if self.axes and not self.is_deepspeed:
            document.setdefault("distributed_type", "MULTI_GPU")
            document.setdefault("parallelism_config", {}).update(as_mesh(self.axes))
        return {"ds_config": self.ds_config, "accelerate_config": document or None}

    def identity(self) -> list[object]:
        """What of the strategy belongs to a run's identity (JSON-able); the world size and its division into axes do not."""
        kind = "ddp" if self.kind == "single" else self.kind  # one process of the same run
        return [kind, without(self.ds_config), self.fsdp]


def unsharded(world: World, source: str) -> Strategy:
    """The strategy of one process, or DDP."""
    kind: Kind = "single" if world.size == 1 else "ddp"
    return Strategy(kind, kind, source)
