"""Accelerate's word on the strategy: from its YAML file, or from what `accelerate launch` put into the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ..errors import UserError
from ..recipe import find, read_yaml

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
# What an option means that is not given. accelerate's launcher hands on all of them, a file holds few: one run.
_FSDP_DEFAULTS = {"reshard_after_forward": True, "cpu_offload": False, "cpu_ram_efficient_loading": True,
                  "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}  # fmt: skip


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
    precision = str(document.get("mixed_precision") or "no")  # YAML reads a bare `no` as false
    kind = str(document.get("distributed_type") or "NO")
    if kind == "DEEPSPEED":
        options = _table(document, "deepspeed_config", name)
        if "deepspeed_config_file" in options:
            return Read(ds_config=options["deepspeed_config_file"], mixed_precision=precision)
        return Read(ds_config=_plain_zero(options, name), mixed_precision=precision)
    if kind in ("MULTI_GPU", "MULTI_CPU") or (kind == "NO" and "distributed_type" in document):
        return Read(mixed_precision=precision)
    if kind != "FSDP":
        found = repr(kind) if "distributed_type" in document else "it is missing"
        raise UserError(f"{name}: distributed_type", f"{found}, so this names no strategy of ours",
                        "set MULTI_GPU, FSDP or DEEPSPEED; a ds_config is given with --ds_config")  # fmt: skip
    options, mesh = _table(document, "fsdp_config", name), _table(document, "parallelism_config", name)
    return _fsdp(options, mesh, name, precision)


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
        return Read(ds_config=_plain_zero(options, "accelerate launch"), mixed_precision=precision)
    if env.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return Read(mixed_precision=precision)
    options = {f"fsdp_{key[5:].lower()}": value for key, value in env.items() if key.startswith("FSDP_")}
    options["fsdp_transformer_layer_cls_to_wrap"] = options.pop("fsdp_transformer_cls_to_wrap", "None")
    prefix = "PARALLELISM_CONFIG_"
    mesh = {key.lower(): value for key, value in env.items() if key.startswith(prefix)}
    return _fsdp({k: v for k, v in options.items() if v != "None"}, mesh, "accelerate launch", precision)


def clear_environment() -> None:
    """Take accelerate's variables out of this process: Strategy holds what they said, and train.py passes it on
    explicitly. Left in place they would be read a second time, by other rules (`--deepspeed` or environment?)."""
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[key]


def check_precision(read: Read, place: str, bf16: bool, fp16: bool) -> None:
    """Raises UserError when the accelerate configuration names another precision than the recipe."""
    ours = "bf16" if bf16 else "fp16" if fp16 else "no"
    if read.mixed_precision not in ("no", ours):
        raise UserError(
            f"{place}: mixed_precision",
            f"{read.mixed_precision!r} here, but the recipe says {'fp32' if ours == 'no' else ours}",
            "remove mixed_precision from the accelerate config; the recipe's bf16 and fp16 own it",
        )


def _plain_zero(options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A ds_config from accelerate's own few ZeRO options (zero_stage, offload_*_device).

    Clipping and accumulation in it are held against the recipe later; a 1 is what accelerate writes unasked.
    """
    stage = _whole(options, "zero_stage", 2, place)
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
        value = yaml.safe_load(str(options.get(key, "none")))
        if value not in (None, "none", "auto", unasked):
            config[key] = value
    return config


def _fsdp(options: Mapping[str, Any], mesh: Mapping[str, Any], place: str, precision: str) -> Read:
    version = _whole(options, "fsdp_version", 1, place)
    if version != 2:
        raise UserError(
            f"{place}: fsdp_config.fsdp_version",
            f"{version}: FSDP1 is deprecated, and a missing fsdp_version means 1 to accelerate",
            "set fsdp_version: 2",
        )
    if _plain(options.get("fsdp_activation_checkpointing", False)) is True:
        raise UserError(f"{place}: fsdp_config.fsdp_activation_checkpointing", "true here, but the recipe owns it",
                        "remove it, and set activation_checkpointing in the recipe")  # fmt: skip
    sizes = {str(key).removeprefix("parallelism_config_"): value for key, value in mesh.items()}
    for key in ("tp_size", "cp_size", "sp_size"):
        if _whole(sizes, key, 1, place) != 1:
            raise UserError(f"{place}: parallelism_config_{key}", f"{sizes[key]}: train.py shards over data-parallel "
                            "ranks only", "set it to 1")  # fmt: skip
    fsdp = {ours: _plain(options[theirs]) for theirs, ours in _FSDP_OPTIONS.items() if theirs in options}
    fsdp = {key: value for key, value in fsdp.items() if value != _FSDP_DEFAULTS.get(key)}
    if fsdp.get("auto_wrap_policy") != "SIZE_BASED_WRAP":
        fsdp.pop("min_num_params", None)
    return Read(
        fsdp=fsdp,
        replicate=_whole(sizes, "dp_replicate_size", 1, place),
        shard=_whole(sizes, "dp_shard_size", 1, place),
        mixed_precision=precision,
    )


def _table(document: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    value = document.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: {key}", f"{value!r} stands where a table belongs", "see accelerate_configs/")
    return value


def _whole(options: Mapping[str, Any], key: str, default: int, place: str) -> int:
    value = options.get(key, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UserError(f"{place}: {key}", f"{value!r} is not a whole number", "see accelerate_configs/") from None


def _plain(value: Any) -> Any:
    words = {"true": True, "false": False}
    if isinstance(value, str):
        return words.get(value.lower(), int(value) if value.isdigit() else value)
    return value
