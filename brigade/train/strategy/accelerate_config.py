"""The strategy that accelerate is configured for: in its YAML file, or in what `accelerate launch` put into the environment.

`findings` and `precision` are the rules over what a run reads of it; the launcher's own part of a file (hosts, ranks,
unknown keys) is lint's: lint/accelerate.py.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, did_you_mean, shown
from ...errors.findings import Finding, raise_first
from ...errors.tables import Document, Fields, table
from ..recipe.files import find, parse_yaml, read_yaml
from .axes import NONE, Axes
from .axis_keys import MESH_KEYS, MESH_SCHEDULE, of_mesh
from .ds_keys import value_at

KEYS = table(Path(__file__).with_name("accelerate_keys.yaml"))
FSDP_KEYS: dict[str, str] = KEYS["fsdp2"]  # TrainingArguments.fsdp_config's -> accelerate's
SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config")
MOE = "deepspeed_moe_layer_cls_names"
MESH = "parallelism_config_"  # before each key of a mesh
LAYERS = "fsdp_transformer_layer_cls_to_wrap"
_VARIABLE = re.compile(r"\$[\w{(]")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")


@dataclass(frozen=True)
class AccelerateStrategy:
    """What an accelerate configuration says of the strategy.

    ds_config: a file or a configuration; fsdp: options, or None; both None: DDP. mixed_precision: "no" says nothing.
    """

    ds_config: str | dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = None
    replicate: int = 1
    shard: int = 1
    mixed_precision: str = "no"
    axes: Axes = NONE


def read(source: str | Fields, place: str) -> AccelerateStrategy:
    """The strategy in an accelerate YAML file; hosts and process numbers in it are the launcher's business."""
    document = source if isinstance(source, dict) else read_yaml(find(source, place, "accelerate config"))
    raise_first(findings(document, place if isinstance(source, dict) else source))
    return _strategy(document)


def from_environment(env: Mapping[str, str]) -> AccelerateStrategy:
    """The strategy that `accelerate launch` asks for, in the environment of a process that it started."""

    def is_on(engine: str) -> bool:
        return env.get(f"ACCELERATE_USE_{engine}", "").lower() == "true"

    def starting_with(prefix: str) -> Fields:
        return {key.removeprefix(prefix).lower(): value for key, value in env.items() if key.startswith(prefix)}

    document: dict[str, Any] = {"distributed_type": "NO"}
    if is_on("MEGATRON_LM"):
        document = {"distributed_type": "MEGATRON_LM"}
    elif is_on("DEEPSPEED"):
        zero = starting_with("ACCELERATE_DEEPSPEED_")
        zero[MOE] = zero.pop("moe_layer_cls_names", None)
        file = zero.pop("config_file", "none")
        for key in ("gradient_clipping", "gradient_accumulation_steps"):
            zero[key] = env.get(f"ACCELERATE_{key.upper()}", "none")
        zero = zero if file.lower() == "none" else {"deepspeed_config_file": file, MOE: zero.get(MOE)}
        document = {"distributed_type": "DEEPSPEED", "deepspeed_config": zero}
    elif is_on("FSDP"):
        fsdp = {f"fsdp_{key}": value for key, value in starting_with("FSDP_").items() if value != "None"}
        if "fsdp_transformer_cls_to_wrap" in fsdp:
            fsdp[LAYERS] = fsdp.pop("fsdp_transformer_cls_to_wrap")
        document = {"distributed_type": "FSDP", "fsdp_config": fsdp}
    mesh = starting_with("PARALLELISM_CONFIG_")
    document["parallelism_config"] = _full_names(mesh)
    problem = ""
    lost = dropped()
    if lost:
        problem = f"it does not hand on {' and '.join(lost)} of the file that it read: accelerate knows no such key"
    elif is_on("PARALLELISM_CONFIG") and all(size == "1" for key, size in mesh.items() if key.endswith("_size")):
        # Its launcher saw a mesh, and knew none of the sizes in it.
        problem = (
            "the file that it read has a mesh, and it hands no size of it on: ep_size and pp_size are not accelerate's"
        )
    if problem:
        cure = "name the file for train.py too: accelerate launch --config_file FILE train.py --accelerate_config FILE"
        raise UserError("accelerate launch: parallelism_config", problem, cure)
    for section, options in zip(SECTIONS, sections(document), strict=True):
        if options:  # without variables of other programs, whose names begin as accelerate's do
            document[section] = {key: value for key, value in options.items() if key in _known(section)}
    raise_first(findings(document, "accelerate launch"))
    return _strategy(document | {"mixed_precision": env["ACCELERATE_MIXED_PRECISION"]})


def launcher() -> tuple[list[str], Path]:
    """(command line of the process that started this one, its directory); nothing where the system does not say."""
    parent = Path("/proc") / str(os.getppid())
    with suppress(OSError):
        return (parent / "cmdline").read_bytes().decode(errors="replace").split("\0"), (parent / "cwd").resolve()
    return [], Path()


def dropped() -> list[str]:
    """Sizes of Brigade's own in the file that `accelerate launch` was given or has by default, which it does not hand on."""
    words, folder = launcher()
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config") else [word])]
    words = ["--config_file" if word == "--config-file" else word for word in words]  # it takes both
    if "--config_file" in words[:-1]:
        file = folder / words[words.index("--config_file") + 1]
    elif any("accelerate" in word for word in words):
        from accelerate.commands.config import config_args

        file = Path(config_args.default_config_file)
    else:
        return []
    try:
        document = read_yaml(file)
    except UserError:  # the launcher has read it
        return []
    sizes = mesh_sizes(sections(document)[2])
    own = [str(key).removeprefix(MESH) for key in KEYS["own"] if str(key).endswith(("_size", "_stages"))]
    return [key for key in own if (_whole(sizes.get(key)) or 1) > 1]


def sections(document: Document) -> list[Document]:
    """deepspeed_config, fsdp_config and parallelism_config: each a table, empty where the document has none."""
    tables = [document.get(section) for section in SECTIONS]
    return [options if isinstance(options, Mapping) else {} for options in tables]


def layer_classes(fsdp: Document) -> list[str]:
    """The classes of layers that FSDP options name, by TrainingArguments' names of the options; none where they are not used."""
    names = fsdp.get("transformer_layer_cls_to_wrap") or []
    if fsdp.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    return names.split(",") if isinstance(names, str) else list(map(str, names))  # blanks stay, as Accelerate lets them


def mesh_sizes(mesh: Document) -> Fields:
    """A mesh by short names: with accelerate's prefix in its files, in capitals in the environment, bare in run.yaml."""
    return {str(key).removeprefix(MESH): value for key, value in mesh.items()}


def findings(document: Document, name: str) -> Iterator[Finding]:
    """What is wrong with an accelerate config in the part that a run reads."""
    variables = list(_variables(document, name))
    if variables:  # what else is wrong depends on their values
        yield from variables
        return
    kind = str(document.get("distributed_type") or "NO")
    if "distributed_type" not in document or kind not in _TYPES:
        value = shown(kind) if "distributed_type" in document else "it is missing"
        yield Finding.of("accelerate-distributed-type", name, "distributed_type", value=value)
    for section in SECTIONS:
        options = document.get(section)
        if options and not isinstance(options, Mapping):
            yield Finding.of("accelerate-not-a-table", name, section, value=shown(options))
    zero, fsdp, mesh = sections(document)
    if kind == "DEEPSPEED":
        yield from _zero_findings(zero, document, name)
    if kind == "FSDP":
        yield from _fsdp_findings(fsdp, mesh, name)
    yield from _mesh_findings(mesh, kind, name)
    for section, options in zip(SECTIONS, (zero, fsdp, _full_names(mesh)), strict=True):
        yield from _unknown_keys(options, section, name)
    yield from unread(document, name)
    for section, options, reader in zip(SECTIONS, (zero, fsdp), ("DEEPSPEED", "FSDP"), strict=False):
        if options and kind in _TYPES and kind != reader:
            use = f"set distributed_type {reader}, or remove the section: {kind} reads none of it"
            yield Finding.of("accelerate-unread", name, section, value=shown(options), use=use)


def _full_names(mesh: Document) -> Fields:
    """A mesh by the names of accelerate's files."""
    return {MESH + key: value for key, value in mesh_sizes(mesh).items()}


def _known(section: str) -> list[str]:
    """The keys of a section that accelerate or a run reads, and those that are refused with a cure of their own."""
    refused = [path.partition(".")[2] for path in KEYS["unread"] if path.startswith(f"{section}.")]
    return [*KEYS[section], *refused, *(KEYS["own"] if section == "parallelism_config" else ())]


def _unknown_keys(options: Document, section: str, name: str) -> Iterator[Finding]:
    for key, value in options.items():
        if key not in _known(section):
            values = {"fate": "copies this key and nobody reads it", "value": shown(value)}
            values["instead"] = did_you_mean(str(key), KEYS[section])
            yield Finding.of("accelerate-unknown-key", name, f"{section}.{key}", **values)


def unread(document: Document, name: str) -> Iterator[Finding]:
    """What accelerate would read of an accelerate config, and nothing in a run does."""
    document = {**document, "parallelism_config": _full_names(sections(document)[2])}
    for path, entry in KEYS["unread"].items():
        value = value_at(document, path)
        if value and str(value).lower() not in ("no", "none", entry.get("default")):
            yield Finding.of("accelerate-unread", name, path, value=shown(value), use=entry["use"])


def _variables(document: Document, name: str) -> Iterator[Finding]:
    """Values that only a shell would replace: accelerate reads the file as it stands."""
    tables = {"": document} | {f"{key}.": table for key, table in zip(SECTIONS, sections(document), strict=True)}
    for prefix, values in tables.items():
        for key, value in values.items():
            if isinstance(value, str) and _VARIABLE.search(value):
                flag = f"--{key} {value}" if not prefix else "a flag of `accelerate launch`"
                yield Finding.of("accelerate-variable", name, f"{prefix}{key}", value=shown(value), flag=flag)


def _zero_findings(zero: Document, document: Document, name: str) -> Iterator[Finding]:
    file = zero.get("deepspeed_config_file")
    if not file:
        stage = zero.get("zero_stage", 2)
        if _whole(stage) is None:
            yield Finding.of("accelerate-not-a-number", name, "deepspeed_config.zero_stage", value=shown(stage))
        return
    if not isinstance(file, str):
        at, problem = "deepspeed_config.deepspeed_config_file", f"{shown(file)} is no file's name"
        yield Finding("file-missing", name, at, problem, "name a file of ds_configs/")
    twice = {f"deepspeed_config.{key}": zero[key] for key in KEYS["not_beside_a_ds_config"] if key in zero}
    if document.get("mixed_precision") is not None:
        twice["mixed_precision"] = document["mixed_precision"]
    for at, value in twice.items():
        yield Finding.of("accelerate-two-sources", name, at, value=shown(value), file=shown(file))


def _fsdp_findings(options: Document, mesh: Document, name: str) -> Iterator[Finding]:
    def found(rule: str, key: str, **values: object) -> Finding:
        return Finding.of(rule, name, f"fsdp_config.{key}", **values)

    version = _whole(options.get("fsdp_version", 1))
    if version is None:
        yield found("accelerate-not-a-number", "fsdp_version", value=shown(options["fsdp_version"]))
    elif version != 2:
        yield found("accelerate-fsdp1", "fsdp_version", version=version)
        return
    for key in ("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"):
        if _parsed(options.get(key)) is True:
            yield found("accelerate-owned-by-recipe", key)
    reshard = _parsed(options.get("fsdp_reshard_after_forward", True))
    strategy = str(options.get("fsdp_sharding_strategy"))
    instead = KEYS["fsdp1_strategies"].get(strategy)
    if instead and (reshard or instead != KEYS["fsdp1_strategies"]["SHARD_GRAD_OP"]):
        yield found("accelerate-fsdp2-value", "fsdp_sharding_strategy", value=shown(strategy), instead=instead)
    of_data = [_whole(size) for key, size in mesh_sizes(mesh).items() if key in ("dp_replicate_size", "dp_shard_size")]
    if strategy in KEYS["hybrid_strategies"] and not any(size != 1 for size in of_data):
        instead = "dp_replicate_size and dp_shard_size, as accelerate_configs/hsdp_2x8.yaml does, or FULL_SHARD"
        yield found("accelerate-fsdp2-value", "fsdp_sharding_strategy", value=shown(strategy), instead=instead)
    if not isinstance(reshard, bool):
        instead = "true (FULL_SHARD, HYBRID_SHARD) or false (SHARD_GRAD_OP)"
        yield found("accelerate-fsdp2-value", "fsdp_reshard_after_forward", value=shown(reshard), instead=instead)
    policy = options.get("fsdp_auto_wrap_policy", _POLICIES[0])
    if policy not in _POLICIES:
        at, problem = "fsdp_config.fsdp_auto_wrap_policy", f"{shown(policy)} is no policy of Accelerate's"
        yield Finding("accelerate-fsdp2-value", name, at, problem, f"write one of {', '.join(_POLICIES)}")
    if str(options.get("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
        values = {"value": "LOCAL_STATE_DICT", "instead": "SHARDED_STATE_DICT"}
        yield found("accelerate-fsdp2-value", "fsdp_state_dict_type", **values)


def _mesh_findings(mesh: Document, kind: str, name: str) -> Iterator[Finding]:
    for key, size in mesh_sizes(mesh).items():
        at = f"parallelism_config.parallelism_config_{key}"
        if key in ("dp_replicate_size", "dp_shard_size", "cp_size", *MESH_KEYS.values(), MESH_SCHEDULE["virtual"]):
            ranks = _whole(size)
            if ranks is None:
                yield Finding.of("accelerate-not-a-number", name, at, value=shown(size))
            elif key == "cp_size" and ranks != 1:
                yield Finding.of("accelerate-parallelism", name, at, value=size)
            elif key == "dp_shard_size" and ranks > 1 and kind not in ("FSDP", "DEEPSPEED"):
                use = f"set distributed_type FSDP, with an fsdp_config, or remove it: {kind} shards nothing by it"
                yield Finding.of("accelerate-unread", name, at, value=size, use=use)


def _whole(value: object) -> int | None:
    """A whole number from 0 in a file or, as text, in the environment; None for all else."""
    number = _parsed(value)
    return number if type(number) is int and number >= 0 else None


def precision(config: AccelerateStrategy, place: str, bf16: bool, fp16: bool) -> Iterator[Finding]:
    """Where the accelerate configuration names another precision than the recipe."""
    ours = "bf16" if bf16 else "fp16" if fp16 else "no"
    if config.mixed_precision not in ("no", ours):
        recipe = "fp32" if ours == "no" else ours
        yield Finding.of("accelerate-precision", place, "mixed_precision", value=config.mixed_precision, recipe=recipe)


def _strategy(document: Document) -> AccelerateStrategy:
    """The strategy of a document without findings."""
    # YAML: `no` is false
    precision = str(document.get("mixed_precision") or ("fp16" if document.get("fp16") else "no"))
    zero, options, mesh = sections(document)
    sizes = mesh_sizes(mesh)
    kind, axes = document["distributed_type"], of_mesh(sizes)
    if kind == "DEEPSPEED":
        source = zero.get("deepspeed_config_file") or _ds_config(zero)
        return AccelerateStrategy(source, mixed_precision=precision, axes=axes)
    if kind != "FSDP":
        return AccelerateStrategy(mixed_precision=precision, axes=axes)
    fsdp = {ours: _parsed(options[theirs]) for ours, theirs in FSDP_KEYS.items() if theirs in options}
    fsdp = {key: value for key, value in fsdp.items() if value != KEYS["fsdp2_defaults"].get(key)}
    if fsdp.get("auto_wrap_policy") != "SIZE_BASED_WRAP":
        fsdp.pop("min_num_params", None)
    replicate, shard = (int(sizes.get(f"dp_{which}_size", 1)) for which in ("replicate", "shard"))
    return AccelerateStrategy(fsdp=fsdp, replicate=replicate, shard=shard, mixed_precision=precision, axes=axes)


def _ds_config(options: Document) -> Fields:
    """A ds_config from accelerate's own few ZeRO options (zero_stage, offload_*_device).

    Clipping and accumulation in it are compared with the recipe later; a 1 is what accelerate writes unasked.
    """
    zero: dict[str, Any] = {"stage": int(options.get("zero_stage", 2))}
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    for block in ("optimizer", "param"):
        device = str(options.get(f"offload_{block}_device", "none")).lower()
        if device != "none":
            zero[f"offload_{block}"] = {"device": device}
        if device == "nvme":
            zero[f"offload_{block}"]["nvme_path"] = str(options.get(f"offload_{block}_nvme_path", "auto"))
    config: dict[str, Any] = {"zero_optimization": zero}
    for key, unasked in (("gradient_clipping", None), ("gradient_accumulation_steps", 1)):
        value = options.get(key, "none")
        with suppress(yaml.YAMLError, ValueError, RecursionError):  # from the environment it comes as text
            value = parse_yaml(str(value))
        if value not in (None, "none", "auto", unasked):
            config[key] = value
    return config


def _parsed(value: object) -> object:
    """An option that the environment has as text."""
    words = {"true": True, "false": False}
    if isinstance(value, str):
        return words.get(value.lower(), int(value) if value.isdecimal() and len(value) < 20 else value)
    return value
