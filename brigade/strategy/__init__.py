"""What is sharded over what, wherever that stands: in a ds_config, an accelerate config, or the launcher's environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cluster import World
from ..errors import UserError
from ..errors.tables import table
from ..recipe.flags import Settings
from ..recipe.method import method_of
from .axes import NONE, Axes, without

if TYPE_CHECKING:
    from .accelerate_config import AccelerateStrategy

PREFIXES = ("sync_", "outer_")  # of keys that speak of replicas
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

    @property
    def is_deepspeed(self) -> bool:
        return self.ds_config is not None

    @property
    def is_fsdp(self) -> bool:
        return self.kind in ("fsdp2", "hsdp")

    @property
    def writes_in_parts(self) -> str:
        """Its name where every host writes a part of each checkpoint, "" where one host writes the whole."""
        in_whole = self.axes.stages == 1 and not self.axes.divides_layers
        return "" if self.kind in ("single", "ddp") and in_whole else self.name

    @property
    def label(self) -> str:
        """Its name and its axes, for a reader: `fsdp2 x expert 2`."""
        return f"{self.name} x {self.axes}" if self.axes else self.name

    def place(self, *keys: str) -> str:
        """Where the first of these that is an axis stands, for a message."""
        from .axis_keys import DS_KEYS, MESH_KEYS

        names = DS_KEYS if self.is_deepspeed else {axis: f"parallelism_config_{key}" for axis, key in MESH_KEYS.items()}
        return f"{self.source}: {next(names[key] for key in keys if key in names)}"

    def as_cluster(self) -> dict[str, Any]:
        """The same strategy as values of a recipe's `cluster:` section, without reference to any file."""
        document: dict[str, Any] = {}
        if self.is_fsdp:
            from .accelerate_config import FSDP_KEYS

            options = {FSDP_KEYS[key]: value for key, value in self.fsdp.items()}
            document = {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, **options},
                "parallelism_config": {"dp_replicate_size": self.replicate, "dp_shard_size": self.shard},
            }
        if self.axes and not self.is_deepspeed:
            from .axis_keys import as_mesh

            document.setdefault("distributed_type", "MULTI_GPU")
            document.setdefault("parallelism_config", {}).update(as_mesh(self.axes))
        return {"ds_config": self.ds_config, "accelerate_config": document or None}

    def identity(self) -> Any:
        """What of the strategy belongs to a run's identity (JSON-able); the world size and its division into axes do not."""
        kind = "ddp" if self.kind == "single" else self.kind  # one process of the same run
        return [kind, without(self.ds_config), self.fsdp]


def choose(settings: Settings, world: World, env: Mapping[str, str] | None = None) -> Strategy:
    """The run's strategy. A flag wins over the launcher's environment, that wins over the recipe.

    Without any of them: one process alone, or DDP. Raises UserError for a file that is missing, malformed or at
    odds with the recipe, and for a strategy that cannot run with this world size or optimizer.
    """
    cluster = settings.recipe.cluster
    named = {key: getattr(cluster, key) for key in ("ds_config", "accelerate_config")}
    named = {key: source for key, source in named.items() if source not in (None, "none")}
    labels = [source if isinstance(source, str) else "its own" for source in named.values()]
    if len(named) == 2:
        problem = "ds_config {} and accelerate_config {} both name a strategy".format(*labels)
        raise UserError(f"{settings.recipe_path}: cluster", problem, "keep one of them")
    by_flag = any(settings.sources.get(key, "").startswith("flag") for key in ("ds_config", "accelerate_config"))
    launched = None if by_flag else _launched(os.environ if env is None else env)
    key, source = next(iter(named.items()), ("", ""))
    if launched:
        strategy = _from_accelerate(launched, "accelerate launch", settings, world)
        if labels:
            settings.overridden.append(f"accelerate launch says {strategy.name} (the recipe says {labels[0]})")
    elif key == "ds_config":
        strategy = _from_ds_config(source, settings.place(key), settings)
    elif key:
        from . import accelerate_config

        place = settings.place(key)
        strategy = _from_accelerate(accelerate_config.read(source, place), place, settings, world)
    else:
        strategy = _unsharded(world, "the world size")
    training = settings.recipe.training
    fields = type(training).model_fields.items()
    if changed := [key for key, info in fields if key.startswith(PREFIXES) and getattr(training, key) != info.default]:
        from . import replicas

        strategy = replicas.inside(strategy, settings, world, changed)
    _check(strategy, settings, world)
    settings.rows_in_parts = strategy.axes.sequence > 1
    return strategy


def _unsharded(world: World, source: str) -> Strategy:
    kind: Kind = "single" if world.size == 1 else "ddp"
    return Strategy(kind, kind, source)


def _launched(env: Mapping[str, str]) -> "AccelerateStrategy | None":
    """What `accelerate launch` asks for, where it started this process."""
    if "ACCELERATE_MIXED_PRECISION" not in env:
        return None
    from .accelerate_config import from_environment

    return from_environment(env)


def _from_ds_config(source: str | dict[str, Any], place: str, settings: Settings) -> Strategy:
    from . import deepspeed_config

    name, config = deepspeed_config.read(source, place)
    config = deepspeed_config.check(config, name, settings)
    kind: Any = f"zero{config['zero_optimization']['stage']}"
    short = name.rsplit("/", 1)[-1].removesuffix(".json")
    name = short if isinstance(source, str) else kind
    return Strategy(kind, name, place, ds_config=config, axes=deepspeed_config.axes_of(config))


def _from_accelerate(config: "AccelerateStrategy", place: str, settings: Settings, world: World) -> Strategy:
    from ..errors.findings import raise_first
    from .accelerate_config import precision

    training = settings.recipe.training
    raise_first(precision(config, place, training.bf16, training.fp16))
    if config.ds_config is not None:
        strategy = _from_ds_config(config.ds_config, place, settings)
        if config.axes:
            from .axis_keys import with_axes
            from .axis_rules import joined

            axes = joined(strategy.axes, config.axes, place)
            strategy = replace(strategy, axes=axes, ds_config=with_axes(strategy.ds_config or {}, axes))
        return strategy
    if config.fsdp is None:
        return replace(_unsharded(world, place), axes=config.axes)
    kind: Kind = "hsdp" if config.replicate > 1 else "fsdp2"
    return Strategy(
        kind, kind, place, fsdp=config.fsdp, replicate=config.replicate, shard=config.shard, axes=config.axes
    )


def refusal(**facts: Any) -> dict[str, Any] | None:
    """The row of refused.yaml that these facts meet (method, kind of strategy, keys of the recipe), or None."""
    rows = table(Path(__file__).with_name("refused.yaml"))
    return next((row for row in rows if all(facts.get(key) in row["when"][key] for key in row["when"])), None)


def _check(strategy: Strategy, settings: Settings, world: World) -> None:
    """Raises UserError where the recipe's method, optimizer or ranks do not fit the strategy."""
    model, training = settings.recipe.model, settings.recipe.training
    for key, info in type(model).model_fields.items():
        of_adapters = key.startswith(("lora_", "use_rslora", "use_dora", "load_in_4bit"))
        if of_adapters and not model.use_peft and getattr(model, key) != info.default:
            problem = f"{key} is set, but use_peft is false: all weights would be trained"
            raise UserError(settings.place(key), problem, "set use_peft: true, or leave the key out")
    facts = {**training.model_dump(), "method": method_of(model), "kind": strategy.kind}
    facts |= dict.fromkeys(strategy.axes.used, True)
    if row := refusal(**facts):
        problem = row["problem"].format(strategy=strategy.name, **facts)
        place = settings.place(row["key"]) if "key" in row else strategy.place(*row["when"])
        raise UserError(place, problem, row["cure"])
    if strategy.axes:
        from . import axis_rules

        axis_rules.check(strategy.axes, strategy.source, settings, world)
    sizes = f"dp_replicate_size {strategy.replicate} x dp_shard_size {strategy.shard}"
    if strategy.kind == "hsdp" and strategy.shard == strategy.axes.model == 1:  # accelerate ends with a bare ValueError
        cure = "set dp_shard_size to 2 or more, or distributed_type: MULTI_GPU for DDP"
        raise UserError(strategy.source, "dp_shard_size 1 shards nothing", cure)
    groups = strategy.kind == "fsdp2" and strategy.replicate > 1  # of HSDP, which are replicas
    inside = world if groups else world.part(strategy.replicas)
    ranks, told = strategy.axes.data(inside.size), strategy.kind == "hsdp" or strategy.shard > 1
    if told and not settings.rehearse and strategy.replicate * strategy.shard != ranks:
        of = f"{world.size} / ({strategy.axes}) = {ranks} ranks" if strategy.axes else f"the world size {ranks}"
        of += " of a replica" if strategy.replicas > 1 and not groups else ""
        raise UserError(strategy.source, f"{sizes} is not {of}", f"set both so that their product is {ranks}")
