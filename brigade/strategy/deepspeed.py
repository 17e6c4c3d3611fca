"""ds_configs: reading, checking against DeepSpeed's keys and the recipe, and filling Brigade's own "auto"s."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, did_you_mean
from ..flags import Settings
from ..recipe import find

_KEYS = Path(__file__).with_name("ds_keys.yaml")


@functools.cache
def key_table() -> dict[str, Any]:
    """ds_keys.yaml: which keys the pinned DeepSpeed takes, which it dropped, and which the recipe owns."""
    return yaml.safe_load(_KEYS.read_text())


def read(source: str | dict[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """Name and content of a ds_config, from a file or given inline (as in run.yaml). Raises UserError."""
    if isinstance(source, dict):
        return place, copy.deepcopy(source)
    path = find(source, place, "ds_config")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(
            f"{source}{line}", f"not JSON: {problem}", "mend that line, or start from ds_configs/"
        ) from None
    if not isinstance(config, dict):
        raise UserError(source, f"holds {type(config).__name__}, not an object", "start from ds_configs/zero3.json")
    return source, config


def check(config: dict[str, Any], name: str, settings: Settings) -> None:
    """Hold a ds_config against DeepSpeed's keys and the recipe, and add the owned keys that it lacks as "auto".

    (A key that is absent is not filled by Transformers: without gradient_clipping DeepSpeed clips at 1.0 whatever
    max_grad_norm says.) Raises UserError with file, key, both values and the cure.
    """
    _check_keys(config, name)
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        found = zero.get("stage") if isinstance(zero, dict) else zero
        raise UserError(f"{name}: zero_optimization.stage", f"{found!r} is not 1, 2 or 3", "see ds_configs/README.md")
    for device_key, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        device = (zero.get(device_key) or {}).get("device", "none")
        if device != "none" and zero["stage"] not in stages:
            raise UserError(
                f"{name}: zero_optimization.{device_key}",
                f"device {device!r} with stage {zero['stage']}: DeepSpeed offloads parameters under stage 3 alone",
                "set stage 3, or remove the block",
            )
        if device == "nvme" and zero["stage"] != 3:
            raise UserError(
                f"{name}: zero_optimization.{device_key}", "NVMe offload needs stage 3", "set stage 3 or cpu"
            )
    _check_against_recipe(config, name, settings)
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        config.setdefault(key, "auto")
    for precision in ("bf16", "fp16"):
        config.setdefault(precision, {}).setdefault("enabled", "auto")


def fill(
    config: dict[str, Any], local_world_size: int, nvme_path: Path, optim: str, largest_shard: int = 10**8
) -> dict[str, Any]:
    """A copy with Brigade's own "auto"s replaced; Transformers fills those that the recipe owns.

    zero_hpz_partition_size: the ranks of one host; nvme_path: `nvme_path`; offload_param.buffer_size: `largest_shard`,
    elements of the largest parameter's shard (DeepSpeed makes five such buffers per rank). And unless `optim` is an
    AdamW, keep it: accelerate replaces any optimizer by DeepSpeedCPUAdam where states are offloaded, silently
    (accelerator.py:2373).
    """
    filled = copy.deepcopy(config)
    if not optim.startswith("adamw"):
        filled.setdefault("zero_force_ds_cpu_optimizer", False)
    zero = filled["zero_optimization"]
    if zero.get("zero_hpz_partition_size") == "auto":
        zero["zero_hpz_partition_size"] = local_world_size
    for block in ("offload_param", "offload_optimizer"):
        if zero.get(block, {}).get("nvme_path") == "auto":
            zero[block]["nvme_path"] = str(nvme_path)
        if zero.get(block, {}).get("buffer_size") == "auto":
            zero[block]["buffer_size"] = largest_shard
    return filled


def swaps_to_nvme(config: dict[str, Any]) -> bool:
    zero = config["zero_optimization"]
    return any((zero.get(block) or {}).get("device") == "nvme" for block in ("offload_param", "offload_optimizer"))


def is_quantised(config: dict[str, Any]) -> bool:
    """ZeRO++'s quantised weights or gradients, whose kernels are CUDA's alone."""
    zero = config["zero_optimization"]
    return any(zero.get(f"zero_quantized_{what}") for what in ("weights", "gradients", "nontrainable_weights"))


def _check_keys(config: dict[str, Any], name: str, prefix: str = "") -> None:
    table = key_table()
    allowed, removed = table["allowed"], table["removed"]
    for key, value in config.items():
        path = f"{prefix}{key}"
        place = f"{name}: {path}"
        if path in removed:
            gone = removed[path]
            since = f"DeepSpeed {table['deepspeed']} no longer takes this key"
            since += f" (gone since {gone['since']})" if gone["since"] != "older" else ""
            raise UserError(place, f"{since}: {json.dumps(value)[:60]}", f"{gone['use']} ({gone['issue']})")
        siblings = [k.rsplit(".", 1)[-1] for k in allowed if k.rpartition(".")[0] == prefix.rstrip(".")]
        if path not in allowed:
            problem = f"DeepSpeed {table['deepspeed']} knows no such key (its value: {json.dumps(value)[:60]})"
            raise UserError(place, problem, did_you_mean(key, siblings))
        if allowed[path].get("block") and not isinstance(value, dict):
            raise UserError(
                place, f"{value!r} stands where a table belongs", f'write "{key}": {{...}}; see ds_configs/'
            )
        if isinstance(value, dict) and not allowed[path].get("free"):
            _check_keys(value, name, f"{path}.")


def _check_against_recipe(config: dict[str, Any], name: str, settings: Settings) -> None:
    training = settings.recipe.training
    owned: dict[str, Any] = {
        "train_batch_size": ("global_batch_size", training.global_batch_size),
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", training.per_device_train_batch_size),
        "gradient_clipping": ("max_grad_norm", training.max_grad_norm),
        "bf16.enabled": ("bf16", training.bf16),
        "fp16.enabled": ("fp16", training.fp16),
    }
    for path, (key, wanted) in owned.items():
        value: Any = config
        for part in path.split("."):
            value = value.get(part, "auto") if isinstance(value, dict) else "auto"
        if value != "auto" and value != wanted:
            raise UserError(
                f"{name}: {path}",
                f"{value!r} here, but {key} is {wanted!r} in {settings.sources.get(key, settings.recipe_path)}",
                f'write "auto" in the ds_config and set {key} in the recipe',
            )
    accumulation = config.get("gradient_accumulation_steps", "auto")
    if accumulation != "auto":
        raise UserError(
            f"{name}: gradient_accumulation_steps",
            f"{accumulation!r} is fixed here, but accumulation follows from global_batch_size and the number of ranks",
            'write "auto"',
        )
    for block, keys in (("optimizer", "optim, learning_rate, weight_decay"), ("scheduler", "lr_scheduler_type")):
        if config.get(block):
            kind = config[block].get("type") if isinstance(config[block], dict) else config[block]
            raise UserError(f"{name}: {block}", f"the recipe owns it, but {kind!r} stands here",
                            f"remove the block; the recipe's keys are {keys}")  # fmt: skip
    for block in ("tensor_parallel", "sequence_parallel_size", "expert_parallel"):
        if config.get(block) not in (None, 1, {}):
            raise UserError(f"{name}: {block}", "train.py shards over data-parallel ranks only", "remove the key")
