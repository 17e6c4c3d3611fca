"""What is sharded over what, wherever that stands: in a ds_config, an accelerate config, or the launcher's environment."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...errors.console import counted
from ...errors.findings import raise_first
from ...errors.tables import Document, Fields, table
from ..host.cluster import World
from ..recipe.method import method_of
from ..recipe.objectives import needs_second_model, objective_of
from ..recipe.settings import Settings
from . import accelerate_config, axis_rules, deepspeed_config, replicas
from .axes import NONE
from .axis_keys import of_ds_config, with_axes
from .strategy import LAUNCHED, Kind, Strategy, unsharded
from .unread import refuse_unread, void_keys

PREFIXES = ("sync_", "outer_")  # of keys that speak of replicas


def choose(settings: Settings, world: World, env: Mapping[str, str] | None = None) -> Strategy:
    """The run's strategy. A flag wins over the launcher's environment, that wins over the recipe.

    Without any of them: one process by itself, or DDP. Raise UserError for a file that is missing, malformed or at
    odds with the recipe, and for a strategy that cannot run with this world size or optimizer.
    """
    cluster = settings.recipe.cluster
    named = {key: getattr(cluster, key) for key in ("ds_config", "accelerate_config")}
    named = {key: source for key, source in named.items() if source is not None}
    labels = [source if isinstance(source, str) else "its own" for source in named.values()]
    if len(named) == 2:
        problem = "ds_config {} and accelerate_config {} both name a strategy".format(*labels)
        raise UserError(f"{settings.recipe_path}: cluster", problem, "keep one of them")
    sources = [settings.sources.get(key, "") for key in ("ds_config", "accelerate_config")]
    flag = next((source for source in sources if source.startswith("flag")), "")
    env = os.environ if env is None else env
    training = settings.recipe.training
    if LAUNCHED in env:
        dynamo = {"dynamo_backend": env.get("ACCELERATE_DYNAMO_BACKEND")}
        raise_first(accelerate_config.unread(dynamo, "accelerate launch"))
        told = accelerate_config.AccelerateStrategy(mixed_precision=env[LAUNCHED])
        raise_first(accelerate_config.precision(told, "accelerate launch", training.bf16, training.fp16))
    if named or (LAUNCHED in env and not flag):
        strategy = _from_files(named, {} if flag else env, settings, world)
    else:
        strategy = unsharded(world, "the world size")
    line = ""
    if LAUNCHED in env and flag:
        launchers = _launchers(strategy, env, settings, world)
        said = f"{flag.removeprefix('flag ')} {labels[0] if labels else 'none'}"
        line = f"{said} (accelerate launch says {launchers})" if launchers else ""
    elif LAUNCHED in env and labels:
        line = f"accelerate launch says {strategy.name} (the recipe says {labels[0]})"
    strategy = replace(strategy, overridden=(line,)) if line else strategy
    fields = type(training).model_fields.items()
    changed = [key for key, info in fields if key.startswith(PREFIXES) and getattr(training, key) != info.default]
    if changed:
        strategy = replicas.inside(strategy, settings, world, changed)
    check(strategy, settings, world)
    return replace(strategy, overridden=(*strategy.overridden, *void_keys(settings.recipe)))


def _from_files(named: Document, env: Mapping[str, str], settings: Settings, world: World) -> Strategy:
    """What the environment asks for, where `accelerate launch` started this process; else what the one entry of `named` does:
    ds_config or accelerate_config -> a path, or a document. Raise UserError for a file that is missing, malformed or at odds
    with the recipe."""
    if LAUNCHED in env:
        return _from_accelerate(accelerate_config.from_environment(env), "accelerate launch", settings, world)
    ((key, source),) = named.items()
    place = settings.place(key)
    if key == "ds_config":
        return _from_ds_config(source, place, settings)
    return _from_accelerate(accelerate_config.read(source, place), place, settings, world)


def _launchers(strategy: Strategy, env: Mapping[str, str], settings: Settings, world: World) -> str:
    """The name of what `accelerate launch` asks for, where that is something else than `strategy`, which a flag names."""
    try:
        theirs = _from_files({}, env, settings, world)
    except UserError:
        engines = [name for name in ("DEEPSPEED", "FSDP") if env.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
        # It hands on too little of a mesh, whose file the flag then names again.
        return "" if strategy.axes else "".join(engines)
    nothing = unsharded(world, "").as_cluster()
    return "" if theirs.as_cluster() in (nothing, strategy.as_cluster()) else theirs.label


def _from_ds_config(source: str | Fields, place: str, settings: Settings) -> Strategy:
    name, config = deepspeed_config.read(source, place)
    config = deepspeed_config.check(config, name, settings)
    kind: Any = f"zero{config['zero_optimization']['stage']}"
    short = name.rsplit("/", 1)[-1].removesuffix(".json")
    name = short if isinstance(source, str) else kind
    return Strategy(kind, name, place, ds_config=config, axes=of_ds_config(config))


def _from_accelerate(
    config: accelerate_config.AccelerateStrategy, place: str, settings: Settings, world: World
) -> Strategy:
    training = settings.recipe.training
    raise_first(accelerate_config.precision(config, place, training.bf16, training.fp16))
    if config.ds_config is not None:
        strategy = _from_ds_config(config.ds_config, place, settings)
        if config.axes != NONE:
            axes = axis_rules.joined(strategy.axes, config.axes, place)
            strategy = replace(strategy, axes=axes, ds_config=with_axes(strategy.ds_config or {}, axes))
        return strategy
    if config.fsdp is None:
        return replace(unsharded(world, place), axes=config.axes)
    kind: Kind = "hsdp" if config.replicate > 1 else "fsdp2"
    return Strategy(
        kind, kind, place, fsdp=config.fsdp, replicate=config.replicate, shard=config.shard, axes=config.axes
    )


def refusal(about: str = "", /, **facts: object) -> Fields | None:
    """The row of refused.yaml that these facts meet (method, kind of strategy, keys of the recipe), or None. about: a fact, of
    whose rows it is one"""
    rows = [row for row in table(Path(__file__).with_name("refused.yaml")) if not about or about in row["when"]]
    return next((row for row in rows if all(facts.get(key) in row["when"][key] for key in row["when"])), None)


def facts_of(strategy: Strategy, settings: Settings) -> Fields:
    """Return what refusal() is told of a strategy and a recipe."""
    model, training = settings.recipe.model, settings.recipe.training
    facts: Fields = {**training.model_dump(), "method": method_of(model), "kind": strategy.kind}
    facts |= dict.fromkeys(strategy.axes.used, True) | {"tiled_loss": bool(training.loss_tiles)}
    facts |= {"neftune": bool(training.neftune_noise_alpha), "loss_terms": training.loss_terms}
    facts |= {"weights": settings.recipe.data.weighs_samples}
    facts |= {"eval_tasks": bool(training.eval_tasks), "sync_every": bool(training.sync_every)}
    facts |= {"loss_spike": training.loss_spike is not None, "streaming": settings.recipe.data.streaming}
    compares = objective_of(training).compares
    facts |= {"compares": compares, "second_model": needs_second_model(settings.recipe)}
    facts |= {
        key: bool(getattr(model, key))
        for key in ("adapter_name_or_path", "trainable_token_indices", "loraplus_lr_ratio")
    }
    facts |= {
        "add_tokens": model.adds_tokens,
        "images": settings.recipe.data.images,
        "tiled_mlp": bool(training.tiled_mlp),
    }
    facts |= {"router_loss": bool(training.router_aux_loss_coef), "router_bias": bool(training.router_bias_update_rate)}
    facts |= {"host_shards": bool(strategy.fsdp.get("cpu_offload")), "nvme_path": settings.recipe.cluster.nvme_path}
    facts |= {"nvme_flag": settings.sources.get("nvme_path", "").startswith("flag")}
    facts |= {"nvme": bool(strategy.ds_config) and deepspeed_config.swaps_to_nvme(strategy.ds_config or {})}
    return facts


def refuse(strategy: Strategy, settings: Settings, about: str = "") -> None:
    """Raise UserError where a row of refused.yaml is met. about: a fact that holds, though the recipe alone does not tell it, and
    of whose rows it is one"""
    facts = facts_of(strategy, settings) | ({about: True} if about else {})
    row = refusal(about, **facts)
    if row:
        problem = row["problem"].format(strategy=strategy.name, **facts)
        place = settings.place(row["key"]) if "key" in row else strategy.place(*row["when"])
        raise UserError(place, problem, row["cure"])


def check(strategy: Strategy, settings: Settings, world: World) -> None:
    """Raise UserError where the recipe's method, optimizer or ranks do not fit the strategy."""
    refuse_unread(settings)
    refuse(strategy, settings)
    axis_rules.check(strategy.axes, strategy.source, settings, world)
    sizes = f"dp_replicate_size {strategy.replicate} x dp_shard_size {strategy.shard}"
    if strategy.kind == "hsdp" and strategy.shard == strategy.axes.model == 1:  # accelerate ends with a bare ValueError
        cure = "set dp_shard_size to 2 or more, or distributed_type: MULTI_GPU for DDP"
        raise UserError(strategy.source, "dp_shard_size 1 shards nothing", cure)
    groups = strategy.kind == "fsdp2" and strategy.replicate > 1  # of HSDP, which are replicas
    inside = world if groups else world.part(strategy.replicas)
    ranks, told = strategy.axes.data(inside.size), strategy.kind == "hsdp" or strategy.shard > 1
    if told and not settings.rehearse and strategy.replicate * strategy.shard != ranks:
        of = (
            f"{world.size} / ({strategy.axes}) = {counted(ranks, 'rank')}"
            if strategy.axes
            else f"the world size {ranks}"
        )
        of += " of a replica" if strategy.replicas > 1 and not groups else ""
        raise UserError(strategy.source, f"{sizes} is not {of}", f"set both so that their product is {ranks}")
