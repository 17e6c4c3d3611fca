"""What is sharded over what, wherever it was said: a ds_config, an accelerate config, or the launcher's environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..cluster import World
from ..errors import UserError
from ..recipe.flags import Settings
from . import accelerate_config, deepspeed_config, methods

Kind = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"]

# These look at the norm or the shape of a whole parameter. DeepSpeed hands the optimizer one flat slice per rank, so
# they would compute something else on every world size (measured: docs/parity.md).
NEED_WHOLE_PARAMETERS = ("lamb", "lars")


@dataclass(frozen=True)
class Strategy:
    """How one run's parameters, gradients and optimizer states lie on its ranks.

    kind: what is sharded: nothing (single, ddp), optimizer states (zero1), and gradients (zero2), and parameters
        (zero3, fsdp2; hsdp shards within groups of `shard` ranks and replicates over `replicate` of them)
    name: short, for the output directory: a ds_config's file name, or the kind
    source: who said so: "flag --ds_config ds_configs/zero3.json", "accelerate launch", ...
    ds_config: DeepSpeed's configuration with its "auto"s, or None
    fsdp: options of TrainingArguments.fsdp_config
    """

    kind: Kind
    name: str
    source: str
    ds_config: dict[str, Any] | None = None
    fsdp: dict[str, Any] = field(default_factory=dict)
    replicate: int = 1
    shard: int = 1

    @property
    def is_deepspeed(self) -> bool:
        return self.ds_config is not None

    @property
    def is_fsdp(self) -> bool:
        return self.kind in ("fsdp2", "hsdp")

    @property
    def writes_in_parts(self) -> str:
        """Its name where every host writes a part of each checkpoint, "" where one host writes the whole."""
        return "" if self.kind in ("single", "ddp") else self.name

    def as_cluster(self) -> dict[str, Any]:
        """The same strategy as values of a recipe's `cluster:` section, without reference to any file."""
        if self.is_deepspeed:
            return {"ds_config": self.ds_config, "accelerate_config": None}
        if not self.is_fsdp:
            return {"ds_config": None, "accelerate_config": None}
        mesh = {"dp_replicate_size": self.replicate, "dp_shard_size": self.shard}
        options = {accelerate_config.FSDP_KEYS[key]: value for key, value in self.fsdp.items()}
        document = {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2, **options},
            "parallelism_config": mesh,
        }
        return {"ds_config": None, "accelerate_config": document}

    def identity(self) -> Any:
        """What of the strategy belongs to a run's identity (JSON-able); the world size does not."""
        kind = "ddp" if self.kind == "single" else self.kind  # one process of the same run
        return [kind, self.ds_config, self.fsdp]


def choose(settings: Settings, world: World, env: Mapping[str, str] | None = None) -> Strategy:
    """The run's strategy. A flag wins over the launcher's environment, that wins over the recipe.

    Without any of them: one process alone, or DDP. Raises UserError for a file that is missing, malformed or at
    odds with the recipe, and for a strategy that cannot run with this world size or optimizer.
    """
    env = os.environ if env is None else env
    cluster = settings.recipe.cluster
    by_flag = {"ds_config", "accelerate_config"} & {k for k, s in settings.sources.items() if s.startswith("flag")}
    plain = Strategy("single" if world.size == 1 else "ddp", "single" if world.size == 1 else "ddp", "the world size")

    if all(named not in (None, "none") for named in (cluster.ds_config, cluster.accelerate_config)):
        raise UserError(
            f"{settings.recipe_path}: cluster",
            f"ds_config {_label(cluster.ds_config)} and accelerate_config "
            f"{_label(cluster.accelerate_config)} both name a strategy",
            "keep one of them",
        )
    launched = accelerate_config.from_environment(env) if not by_flag else None
    if launched:
        strategy = _from_accelerate(launched, "accelerate launch", plain, settings)
        named = cluster.ds_config or cluster.accelerate_config
        if named:
            settings.overridden.append(f"accelerate launch says {strategy.name} (the recipe says {_label(named)})")
    elif cluster.ds_config not in (None, "none"):
        strategy = _from_ds_config(cluster.ds_config, settings.place("ds_config"), settings)
    elif cluster.accelerate_config not in (None, "none"):
        place = settings.place("accelerate_config")
        strategy = _from_accelerate(accelerate_config.read(cluster.accelerate_config, place), place, plain, settings)
    else:
        strategy = plain
    _check(strategy, settings, world)
    return strategy


def _from_ds_config(source: str | dict[str, Any], place: str, settings: Settings) -> Strategy:
    name, config = deepspeed_config.read(source, place)
    config = deepspeed_config.check(config, name, settings)
    stage = config["zero_optimization"]["stage"]
    short = name.rsplit("/", 1)[-1].removesuffix(".json")
    return Strategy(f"zero{stage}", short if isinstance(source, str) else f"zero{stage}", place, ds_config=config)  # type: ignore[arg-type]


def _from_accelerate(read: accelerate_config.Read, place: str, plain: Strategy, settings: Settings) -> Strategy:
    accelerate_config.check_precision(read, place, settings.recipe.training.bf16, settings.recipe.training.fp16)
    if read.ds_config is not None:
        return _from_ds_config(read.ds_config, place, settings)
    if read.fsdp is None:
        return Strategy(plain.kind, plain.name, place)
    kind: Kind = "hsdp" if read.replicate > 1 else "fsdp2"
    return Strategy(kind, kind, place, fsdp=read.fsdp, replicate=read.replicate, shard=read.shard)


def _check(strategy: Strategy, settings: Settings, world: World) -> None:
    training = settings.recipe.training
    methods.check_keys(settings, strategy)
    if strategy.is_deepspeed and training.optim in NEED_WHOLE_PARAMETERS:
        raise UserError(
            settings.place("optim"),
            f"{training.optim} needs whole parameters, but {strategy.name} hands the optimizer flat slices of them",
            "use DDP (--ds_config none) or FSDP2 (--accelerate_config ...), or optim adamw_torch",
        )
    if strategy.is_fsdp and training.optim.endswith("adamw_8bit"):
        raise UserError(
            settings.place("optim"),
            f"{training.optim} is bitsandbytes', which knows no DTensors, and {strategy.name} shards into them",
            "use DDP or ZeRO (--ds_config ds_configs/zero2.json), or optim adamw_torch",
        )
    if strategy.kind == "hsdp" and not settings.rehearse and strategy.replicate * strategy.shard != world.size:
        raise UserError(
            strategy.source,
            f"dp_replicate_size {strategy.replicate} x dp_shard_size {strategy.shard} is not the world size {world.size}",
            f"set both so that their product is {world.size}",
        )
    hook = training.ddp_comm_hook
    if hook != "none" and strategy.kind not in ("single", "ddp"):
        raise UserError(
            settings.place("ddp_comm_hook"),
            f"{hook} compresses what DDP sends, but {strategy.name} reduces gradients by itself",
            "set it to none, or use DDP (--ds_config none); what ZeRO-3 sends is compressed by ds_configs/zeropp.json",
        )
    if hook == "power_sgd" and training.fp16:
        raise UserError(
            settings.place("ddp_comm_hook"),
            "power_sgd carries errors over from step to step, and fp16's loss scaling changes their scale or makes them inf",
            "use bf16 instead of fp16, or ddp_comm_hook fp16",
        )
    if training.bf16 and training.fp16:
        raise UserError(settings.place("fp16"), "both bf16 and fp16 are true", "keep bf16, or fp16 on older GPUs")


def _label(named: str | dict[str, Any] | None) -> str:
    return named if isinstance(named, str) else "its own"
