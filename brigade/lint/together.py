"""Files that go together: a recipe with its strategy and hosts, an accelerate config with the files that it names."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..errors.console import counted
from ..errors.findings import Finding
from ..errors.tables import Document, Fields
from ..plan.hardware.network import hold_name
from ..train.host.cluster import World
from ..train.recipe.batch import Batch, batch_arithmetic
from ..train.recipe.files import REPOSITORY
from ..train.recipe.schedules import check_last_rate
from ..train.recipe.settings import Settings
from ..train.strategy import Strategy, accelerate_config, axis_rules, choose, deepspeed_config
from ..train.strategy.axes import NONE, Axes
from ..train.strategy.axis_keys import of_ds_config, of_mesh
from . import accelerate as launcher
from . import rows
from .files import File, Files, Kind, of_error, strategy_findings

STRATEGIES: dict[str, Kind] = {"ds_config": "ds_config", "accelerate_config": "accelerate"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def findings(files: Files, named: list[File]) -> Iterator[Finding]:
    """What is wrong with pairs of files: each with what it refers to, and the named files with each other.

    A named strategy or hostfile takes the place of the recipe's own. With several recipes and several hostfiles, nobody
    knows which go together: then each recipe keeps its own.
    """
    kinds = ("recipe", "accelerate", "ds_config", "hostfile")
    sound = [file for file in named if file.content]
    recipes, configs, plain, hostfiles = ([file for file in sound if file.kind == kind] for kind in kinds)

    def choices(given: list[File]) -> list[File | None]:
        return [*given] if len(given) == 1 or (given and len(recipes) == 1) else [None]

    for config in configs:
        yield from _launched(files, config, hostfiles if len(hostfiles) == 1 else [])
    for recipe in recipes:
        for strategy, hosts in itertools.product(choices(configs + plain), choices(hostfiles)):
            yield from _recipe(files, recipe, strategy, hosts)


def _launched(files: Files, config: File, hostfiles: list[File]) -> Iterator[Finding]:
    """Check an accelerate config with the files that it names and the hosts that it is started on."""
    zero = accelerate_config.sections(config.content)[0]
    kinds: dict[str, Kind] = {"deepspeed_config_file": "ds_config", "deepspeed_hostfile": "hostfile"}
    for key, kind in kinds.items():
        if config.content.get("distributed_type") == "DEEPSPEED" and isinstance(zero.get(key), str):
            other = files.open(zero[key], config, f"deepspeed_config.{key}", kind)
            hostfiles = [*hostfiles, other] if kind == "hostfile" else hostfiles
    for hosts in hostfiles:
        if hosts.kind == "hostfile" and hosts.is_sound:
            yield from launcher.against_hosts(config.content, config.name, hosts.content, hosts.name)


def _recipe(files: Files, recipe: File, strategy: File | None, hosts: File | None) -> Iterator[Finding]:
    """Check a recipe with this strategy and these hosts, or with its own: all that train.py and `launch` check at the start."""
    settings: Settings = recipe.content
    cluster = settings.recipe.cluster
    strategies = [strategy] if strategy else [*filter(None, (_own(files, recipe, key) for key in STRATEGIES))]
    if strategy:
        values = {key: strategy.name if kind == strategy.kind else None for key, kind in STRATEGIES.items()}
        changed = settings.recipe.model_copy(update={"cluster": cluster.model_copy(update=values)})
        settings = dataclasses.replace(settings, recipe=changed)
    belong_together = hosts is not None or strategy is None
    if hosts is None and cluster.hostfile:
        hosts = files.open(cluster.hostfile, recipe, "cluster.hostfile", "hostfile")
    contradictions: list[Finding] = []
    for file in strategies:
        if file.kind == "accelerate":
            contradictions += _launched(files, file, [hosts] if hosts and belong_together else [])
        contradictions += _contradictions(files, file, settings)
    yield from contradictions
    yield from rows.findings(recipe.name, settings)
    is_sound = all(file.is_sound for file in (recipe, *strategies))
    errors = [finding for finding in contradictions if finding.severity == "error"]
    if is_sound and not errors:  # else the run would only repeat the first
        yield from _as_run(recipe, settings, strategies, hosts if hosts and hosts.kind == "hostfile" else None)


def _own(files: Files, recipe: File, key: str) -> File | None:
    """The strategy that a recipe names or holds under a key of STRATEGIES, or None."""
    value, kind = getattr(recipe.content.recipe.cluster, key), STRATEGIES[key]
    if value is None:
        return None
    if isinstance(value, str):
        file = files.open(value, recipe, f"cluster.{key}", kind)
        return file if file.kind == kind else None
    file = File(f"{recipe.name}: cluster.{key}", kind, value)
    file.findings = strategy_findings(file)
    return files.read.setdefault(Path(file.name), file)


def _contradictions(files: Files, file: File, settings: Settings) -> Iterator[Finding]:
    """The places where a strategy's file and the recipe contradict each other."""
    if file.kind == "accelerate":
        if not file.is_sound:
            return
        training, strategy = settings.recipe.training, accelerate_config.read(file.content, file.name)
        yield from accelerate_config.precision(strategy, file.name, training.bf16, training.fp16)
        if isinstance(strategy.ds_config, dict):
            file = File(f"{file.name}: deepspeed_config", "ds_config", strategy.ds_config)
        elif strategy.ds_config:
            file = files.open(strategy.ds_config, file, "deepspeed_config.deepspeed_config_file", "ds_config")
    if file.kind == "ds_config":
        yield from deepspeed_config.against_recipe(file.content, file.name, settings)


def _as_run(recipe: File, settings: Settings, strategies: list[File], hosts: File | None) -> Iterator[Finding]:
    """What the run itself would refuse, on as many ranks as the files name."""
    documents = [file.content for file in strategies if file.kind == "accelerate"]
    processes = next(filter(None, (launcher.number(document, "num_processes") for document in documents)), None)
    mesh = next(filter(None, map(launcher.mesh, documents)), (1, 1))
    slots = hosts.content if hosts and hosts.is_sound else {}
    axes = next(filter(None, map(_axes, strategies)), NONE)
    size = processes or sum(slots.values()) or mesh[0] * mesh[1] * axes.unit
    world = World(0, 0, size, min(size, next(iter(slots.values()), size)), next(iter(slots), "here"), "lint")
    try:
        hold_name(settings.recipe.cluster.network or "", settings.place("network"))
        check_last_rate(settings.recipe.training, settings.recipe.training.learning_rate, settings.place)
    except UserError as error:
        yield of_error("recipe-invalid", error, recipe.name, settings.recipe_path)
    try:
        strategy = choose(settings, world, env={})
        axes = strategy.axes
        config = _model_config(settings)
        if config is not None:
            yield from _experts(recipe, config, strategy)
            yield from _sizes(recipe, config, strategy, world.part(strategy.replicas).size)
            yield from _layers(recipe, config, strategy)
    except UserError as error:
        yield of_error("recipe-strategy", error, recipe.name, settings.recipe_path)
    try:
        batch = batch_arithmetic(settings.recipe.training, axes.data(size), settings.place("global_batch_size"))
        divided = f"{batch.global_size} sequences over {counted(size, 'rank')} in micro-batches of {batch.micro}"
        problem = f"{divided}: {batch.wasted:.1%} of each step is filler"
        finding = Finding("recipe-filler", recipe.name, "training.global_batch_size", problem, without_filler(batch))
        wrong = batch.fillers > 0
    except UserError as error:
        finding, wrong = of_error("recipe-batch", error, recipe.name, settings.recipe_path), True
    if wrong:
        source = hosts.name if hosts and not processes else strategies[0].name if processes else "the world size"
        yield dataclasses.replace(finding, problem=f"{finding.problem} ({source})")


def _axes(file: File) -> Axes:
    """The axes that a strategy's file asks for by itself."""
    if file.kind == "ds_config":
        return of_ds_config(file.content)
    return of_mesh(accelerate_config.mesh_sizes(accelerate_config.sections(file.content)[2]))


def _model_config(settings: Settings) -> Fields | None:
    """The model's config.json with its text part laid over it; None where it is not on this machine."""
    config: Any = None
    with suppress(UserError, OSError, ValueError, RecursionError):
        name, beside = settings.recipe.model.model_name_or_path, settings.recipe_path.with_name("config.json")
        own = [folder / "config.json" for folder in (Path(name).expanduser(), REPOSITORY / name)]
        path = next((path for path in own if path.is_file()), beside)
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        return None
    return config | (config["text_config"] if isinstance(config.get("text_config"), dict) else {})


def _sizes(recipe: File, config: Document, strategy: Strategy, ranks: int) -> Iterator[Finding]:
    """Sizes of a model that do not divide over the axes: heads, key-value heads and feed-forward widths of which a rank would get
    no whole share, or a share that FSDP2 does not shard; too few layers for the stages; experts that only tensor groups would
    divide. ranks: in a replica"""
    axes = strategy.axes
    heads, stages = "num_attention_heads", axes.every_stage
    sizes = [("sequence", heads, axes.sequence)]
    sizes += [("tensor", key, axes.tensor) for key in (heads, "num_key_value_heads", "intermediate_size")]
    misfits = [(axis, key, size, "a divisor of {}") for axis, key, size in sizes if _number(config, key) % size]
    if stages > 1 and 0 < _number(config, "num_hidden_layers") < stages:
        misfits.append(("pipeline", "num_hidden_layers", stages, "{} or less"))
    experts = _experts_key(config)
    if axes.tensor > 1 and axes.experts == 1 and experts:
        misfits.append(("tensor", experts, axes.tensor, "1, or divide the experts too (parallelism_config_ep_size)"))
    for axis, key, size, cure in misfits:
        number = config[key]
        values = {"axis": axis, "key": key, "number": number, "size": size, "model": config.get("model_type")}
        yield Finding.of("recipe-sizes", recipe.name, "model.model_name_or_path", **values, fits=cure.format(number))
    columns = axis_rules.outputs(config, bool(config.get("tie_word_embeddings")))
    uneven = None if misfits else axis_rules.uneven_parts(columns, axes.tensor, strategy.shards(ranks))
    if uneven:
        yield Finding("recipe-sizes", recipe.name, "model.model_name_or_path", *uneven)


def _layers(recipe: File, config: Document, strategy: Strategy) -> Iterator[Finding]:
    """Layer classes of the strategy that the code of the model's kind lacks. Says nothing where other code than Transformers' may
    run."""
    kind = str(config.get("model_type") or "")
    code = _modeling_code(kind) if "auto_map" not in config and "vision_config" not in config else ""
    for name in accelerate_config.layer_classes(strategy.fsdp) if code else []:
        if not re.search(rf"\b{re.escape(name)}\b", code):
            yield Finding.of("recipe-layers", recipe.name, "cluster.accelerate_config", name=name, model=kind)


def _modeling_code(kind: str) -> str:
    """The text of Transformers' modules that define models of a kind ("qwen3", "gemma3_text"), "" where there are none. Importing
    them would take 3 s."""
    spec = importlib.util.find_spec("transformers")
    for name in (kind, kind.removesuffix("_text")):
        for root in (spec.submodule_search_locations or []) if spec and name.isidentifier() else []:
            files = sorted(Path(root, "models", name).glob("modeling_*.py"))
            if files:
                return "\n".join(file.read_text(encoding="utf-8") for file in files)
    return ""


def _number(config: Document, key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _experts_key(config: Document) -> str | None:
    """The key that says how many experts a mixture of experts has; None for a dense model."""
    return next((key for key in EXPERTS if _number(config, key) > 1), None)


def _experts(recipe: File, config: Document, strategy: Strategy) -> Iterator[Finding]:
    """A finding where the experts do not divide over the strategy's ranks."""
    key = _experts_key(config)
    values = {"key": key or "experts", "experts": config[key] if key else 0, "model": config.get("model_type")}
    size = strategy.axes.experts
    if size > 1 and (not key or config[key] % size):
        yield Finding.of("recipe-experts", recipe.name, "model.model_name_or_path", **values, size=size)


def without_filler(batch: Batch) -> str:
    """What to change so that no part of a step is wasted, in words."""
    unit = batch.micro * batch.data_parallel_size
    near = sorted({max(unit, batch.global_size // unit * unit), math.ceil(batch.global_size / unit) * unit})
    share, rest = divmod(batch.global_size, batch.data_parallel_size)
    other = max((micro for micro in range(1, batch.micro) if share % micro == 0), default=0)
    micro = f"set per_device_train_batch_size to {other}, or " if other and not rest else ""
    return f"{micro}set global_batch_size to {' or '.join(map(str, near))}"
