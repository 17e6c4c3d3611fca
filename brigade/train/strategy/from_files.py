"""A strategy as a ds_config, an accelerate config or the environment of `accelerate launch` has it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors.findings import raise_first
from ..cluster import World
from ..recipe.flags import Settings
from . import accelerate_config, deepspeed_config
from .accelerate_config import precision
from .axis_keys import with_axes
from .axis_rules import joined
from .strategy import LAUNCHED, Kind, Strategy, unsharded

if TYPE_CHECKING:
    from .accelerate_config import AccelerateStrategy


def choose(named: Mapping[str, Any], env: Mapping[str, str], settings: Settings, world: World) -> Strategy:
    """What the environment asks for, where `accelerate launch` started this process; else what the one entry of `named` does:
    ds_config or accelerate_config -> a path, or a document. Raises UserError for a file that is missing, malformed or at odds
    with the recipe."""
    if LAUNCHED in env:
        return _from_accelerate(accelerate_config.from_environment(env), "accelerate launch", settings, world)
    ((key, source),) = named.items()
    place = settings.place(key)
    if key == "ds_config":
        return _from_ds_config(source, place, settings)
    return _from_accelerate(accelerate_config.read(source, place), place, settings, world)


def _from_ds_config(source: str | dict[str, Any], place: str, settings: Settings) -> Strategy:
    name, config = deepspeed_config.read(source, place)
    config = deepspeed_config.check(config, name, settings)
    kind: Any = f"zero{config['zero_optimization']['stage']}"
    short = name.rsplit("/", 1)[-1].removesuffix(".json")
    name = short if isinstance(source, str) else kind
    return Strategy(kind, name, place, ds_config=config, axes=deepspeed_config.axes_of(config))


def _from_accelerate(config: "AccelerateStrategy", place: str, settings: Settings, world: World) -> Strategy:
    training = settings.recipe.training
    raise_first(precision(config, place, training.bf16, training.fp16))
    if config.ds_config is not None:
        strategy = _from_ds_config(config.ds_config, place, settings)
        if config.axes:
            axes = joined(strategy.axes, config.axes, place)
            strategy = replace(strategy, axes=axes, ds_config=with_axes(strategy.ds_config or {}, axes))
        return strategy
    if config.fsdp is None:
        return replace(unsharded(world, place), axes=config.axes)
    kind: Kind = "hsdp" if config.replicate > 1 else "fsdp2"
    return Strategy(
        kind, kind, place, fsdp=config.fsdp, replicate=config.replicate, shard=config.shard, axes=config.axes
    )
