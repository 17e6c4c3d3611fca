"""Accelerate's word on the strategy: from its YAML file, or from what `accelerate launch` put into the environment.

`findings` and `precision` are the rules over what a run reads of it; the launcher's own part of a file (hosts, ranks,
unknown keys) is lint's: lint/accelerate.py.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from ..errors.findings import Finding, raise_first, shown
from ..recipe.files import find, read_yaml

# accelerate's keys -> TrainingArguments.fsdp_config's. What is not here does not exist under FSDP2.
_FSDP_OPTIONS = {
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "fsdp_auto_wrap_policy": "auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "min_num_params",
}
FSDP_KEYS = {ours: theirs for theirs, ours in _FSDP_OPTIONS.items()}
# What accelerate refuses beside deepspeed_config_file (utils/dataclasses.py:1507), mixed_precision at top level aside.
NOT_BESIDE_A_DS_CONFIG = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config")
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
# What an option means that is not given. accelerate's launcher hands on all of them, a file holds few: one run.
_FSDP_DEFAULTS = {
    "reshard_after_forward": True,
    "cpu_offload": False,
    "cpu_ram_efficient_loading": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}


@dataclass(frozen=True)
class Read:
    """What an accelerate configuration says of the strategy.

    ds_config: a file or a configuration; fsdp: options, or None; both None: DDP. mixed_precision: "no" says nothing.
    """

    ds_config: str | dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = None
    replicate: int = 1
    shard: int = 1
    mixed_precision: str = "no"


def read(source: str | dict[str, Any], place: str) -> Read:
    """The strategy in an accelerate YAML file; hosts and process numbers in it are the launcher's business."""
    document = source if isinstance(source, dict) else read_yaml(find(source, place, "accelerate config"))
    name = place if isinstance(source, dict) else source
    raise_first(findings(document, name))
    precision = str(document.get("mixed_precision") or "no")  # YAML reads a bare `no` as false
    kind = str(document["distributed_type"] or "NO")
    zero, fsdp, mesh = (document.get(section) or {} for section in SECTIONS)
    if kind == "DEEPSPEED":
        return Read(ds_config=zero.get("deepspeed_config_file") or _plain_zero(zero), mixed_precision=precision)
    return _fsdp(fsdp, mesh, precision) if kind == "FSDP" else Read(mixed_precision=precision)


def findings(document: Mapping[str, Any], name: str) -> Iterator[Finding]:
    """What is wrong with an accelerate config in the part that a run reads."""
    kind = str(document.get("distributed_type") or "NO")
    if "distributed_type" not in document or kind not in _TYPES:
        found = shown(kind) if "distributed_type" in document else "it is missing"
        yield Finding(
            "accelerate-distributed-type",
            name,
            "distributed_type",
            f"{found}, so this names no strategy of ours",
            "set MULTI_GPU, FSDP or DEEPSPEED; a ds_config is given with --ds_config",
        )
    tables = {}
    for section in SECTIONS:
        tables[section] = document.get(section) or {}
        if not isinstance(tables[section], Mapping):
            problem = f"{shown(tables[section])} stands where a table belongs"
            yield Finding("accelerate-not-a-table", name, section, problem, "see accelerate_configs/")
            tables[section] = {}
    zero, fsdp, mesh = (tables[section] for section in SECTIONS)
    if kind == "DEEPSPEED":
        yield from _zero_findings(zero, document, name)
    if kind == "FSDP":
        yield from _fsdp_findings(fsdp, mesh, name)


def _zero_findings(zero: Mapping[str, Any], document: Mapping[str, Any], name: str) -> Iterator[Finding]:
    file = zero.get("deepspeed_config_file")
    if not file:
        yield from _number(zero, "zero_stage", 2, name, "deepspeed_config")
        return
    if not isinstance(file, str):
        yield Finding(
            "file-missing",
            name,
            "deepspeed_config.deepspeed_config_file",
            f"{shown(file)} is no file's name",
            "name a file of ds_configs/",
        )
    twice = {f"deepspeed_config.{key}": zero[key] for key in NOT_BESIDE_A_DS_CONFIG if key in zero}
    if document.get("mixed_precision") is not None:
        twice["mixed_precision"] = document["mixed_precision"]
    for at, value in twice.items():
        problem = f"{shown(value)} here, beside deepspeed_config_file {shown(file)}: accelerate refuses both at once"
        yield Finding("accelerate-two-sources", name, at, problem, "remove it; the recipe and the ds_config say it")


def from_environment(env: Mapping[str, str]) -> Read | None:
    """The strategy that `accelerate launch` asks for, or None when it did not start this process."""
    if "ACCELERATE_MIXED_PRECISION" not in env:
        return None
    precision = env["ACCELERATE_MIXED_PRECISION"]
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if file.lower() != "none":
            return Read(ds_config=file, mixed_precision=precision)
        prefix = "ACCELERATE_DEEPSPEED_"
        options = {key.removeprefix(prefix).lower(): value for key, value in env.items() if key.startswith(prefix)}
        for key in ("gradient_clipping", "gradient_accumulation_steps"):
            options[key] = env.get(f"ACCELERATE_{key.upper()}", "none")
        raise_first(_number(options, "zero_stage", 2, "accelerate launch"))
        return Read(ds_config=_plain_zero(options), mixed_precision=precision)
    if env.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return Read(mixed_precision=precision)
    options = {f"fsdp_{key[5:].lower()}": value for key, value in env.items() if key.startswith("FSDP_")}
    options["fsdp_transformer_layer_cls_to_wrap"] = options.pop("fsdp_transformer_cls_to_wrap", "None")
    prefix = "PARALLELISM_CONFIG_"
    mesh = {key.lower(): value for key, value in env.items() if key.startswith(prefix)}
    options = {k: v for k, v in options.items() if v != "None"}
    raise_first(_fsdp_findings(options, mesh, "accelerate launch"))
    return _fsdp(options, mesh, precision)


def clear_environment() -> None:
    """Take accelerate's variables out of this process: Strategy holds what they said, and train.py passes it on
    explicitly. Left in place they would be read a second time, by other rules (`--deepspeed` or environment?)."""
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[key]


def check_precision(read: Read, place: str, bf16: bool, fp16: bool) -> None:
    """Raises UserError when the accelerate configuration names another precision than the recipe."""
    raise_first(precision(read, place, bf16, fp16))


def precision(read: Read, place: str, bf16: bool, fp16: bool) -> Iterator[Finding]:
    ours = "bf16" if bf16 else "fp16" if fp16 else "no"
    if read.mixed_precision not in ("no", ours):
        problem = f"{read.mixed_precision!r} here, but the recipe says {'fp32' if ours == 'no' else ours}"
        cure = "remove mixed_precision from the accelerate config; the recipe's bf16 and fp16 own it"
        yield Finding("accelerate-precision", place, "mixed_precision", problem, cure)


def _plain_zero(options: Mapping[str, Any]) -> dict[str, Any]:
    """A ds_config from accelerate's own few ZeRO options (zero_stage, offload_*_device).

    Clipping and accumulation in it are held against the recipe later; a 1 is what accelerate writes unasked.
    """
    stage = int(options.get("zero_stage", 2))
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
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
            value = yaml.safe_load(str(value))
        if value not in (None, "none", "auto", unasked):
            config[key] = value
    return config


def _fsdp_findings(options: Mapping[str, Any], mesh: Mapping[str, Any], name: str) -> Iterator[Finding]:
    wrong = list(_number(options, "fsdp_version", 1, name, "fsdp_config"))
    yield from wrong
    if not wrong and (version := int(options.get("fsdp_version", 1))) != 2:
        problem = f"{version}: FSDP1 is deprecated, and a missing fsdp_version means 1 to accelerate"
        yield Finding("accelerate-fsdp1", name, "fsdp_config.fsdp_version", problem, "set fsdp_version: 2")
        return
    if _plain(options.get("fsdp_activation_checkpointing", False)) is True:
        at, cure = (
            "fsdp_config.fsdp_activation_checkpointing",
            "remove it, and set activation_checkpointing in the recipe",
        )
        yield Finding("accelerate-owned-by-recipe", name, at, "true here, but the recipe owns it", cure)
    reshard = _plain(options.get("fsdp_reshard_after_forward", True))
    if not isinstance(reshard, bool):
        problem = f"{shown(reshard)} is a value of FSDP1's"
        cure = "write true (FULL_SHARD, HYBRID_SHARD) or false (SHARD_GRAD_OP)"
        yield Finding("accelerate-fsdp2-value", name, "fsdp_config.fsdp_reshard_after_forward", problem, cure)
    if str(options.get("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
        yield Finding(
            "accelerate-fsdp2-value",
            name,
            "fsdp_config.fsdp_state_dict_type",
            "FSDP2 has no LOCAL_STATE_DICT",
            "write SHARDED_STATE_DICT",
        )
    sizes = _sizes(mesh)
    for key in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
        at = f"parallelism_config_{key}"
        wrong = list(_number({at: sizes.get(key, 1)}, at, 1, name, "parallelism_config"))
        yield from wrong
        if not wrong and not key.startswith("dp_") and int(sizes.get(key, 1)) != 1:
            problem = f"{sizes[key]}: train.py shards over data-parallel ranks only"
            yield Finding("accelerate-parallelism", name, f"parallelism_config.{at}", problem, "set it to 1")


def _fsdp(options: Mapping[str, Any], mesh: Mapping[str, Any], precision: str) -> Read:
    fsdp = {ours: _plain(options[theirs]) for theirs, ours in _FSDP_OPTIONS.items() if theirs in options}
    fsdp = {key: value for key, value in fsdp.items() if value != _FSDP_DEFAULTS.get(key)}
    if fsdp.get("auto_wrap_policy") != "SIZE_BASED_WRAP":
        fsdp.pop("min_num_params", None)
    sizes = _sizes(mesh)
    return Read(
        fsdp=fsdp,
        replicate=int(sizes.get("dp_replicate_size", 1)),
        shard=int(sizes.get("dp_shard_size", 1)),
        mixed_precision=precision,
    )


def _sizes(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """A mesh by short names: with accelerate's prefix in its files, in capitals in the environment, bare in run.yaml."""
    return {str(key).removeprefix("parallelism_config_"): value for key, value in mesh.items()}


def _number(options: Mapping[str, Any], key: str, default: int, name: str, section: str = "") -> Iterator[Finding]:
    value = options.get(key, default)
    try:
        int(value)
    except (TypeError, ValueError, OverflowError):
        at = f"{section}.{key}" if section else key
        problem = f"{shown(value)} is not a whole number"
        yield Finding("accelerate-not-a-number", name, at, problem, "see accelerate_configs/")


def _plain(value: Any) -> Any:
    words = {"true": True, "false": False}
    if isinstance(value, str):
        return words.get(value.lower(), int(value) if value.isdigit() else value)
    return value
