"""ds_configs: reading, checking against DeepSpeed's keys and the recipe, and filling Brigade's own "auto"s.

`findings` and `against_recipe` are the rules over a ds_config, for lint and for the run; what only lint says of one is
in lint/ds_config.py.
"""

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError, did_you_mean
from ..flags import Settings
from ..lint.rules import Finding, raise_first, shown, table
from ..recipe import find

_KEYS = Path(__file__).with_name("ds_keys.yaml")


@functools.cache
def key_table() -> dict[str, Any]:
    """ds_keys.yaml: which keys the pinned DeepSpeed takes, which it dropped, and which the recipe owns."""
    return table(_KEYS)


def read(source: str | dict[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """Name and content of a ds_config, from a file or given inline (as in run.yaml). Raises UserError."""
    if isinstance(source, dict):
        return place, copy.deepcopy(source)
    path = find(source, place, "ds_config")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
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
    raise_first(itertools.chain(findings(config, name), against_recipe(config, name, settings)))
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


def value_at(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path, or the default where a table on the way is missing or no table."""
    for part in path.split("."):
        config = config.get(part, default) if isinstance(config, dict) else default
    return config


def findings(config: dict[str, Any], name: str) -> Iterator[Finding]:
    """What is wrong with a ds_config whatever the recipe says."""
    yield from _keys(config, name)
    yield from _stage_and_offload(config, name)
    accumulation = config.get("gradient_accumulation_steps", "auto")
    if accumulation != "auto":
        problem = f"{shown(accumulation)} is fixed here, but accumulation follows from global_batch_size and the number of ranks"
        yield Finding("ds-accumulation", name, "gradient_accumulation_steps", problem, 'write "auto"')
    gone = key_table()["removed_optimizers"]
    for block, keys in (("optimizer", "optim, learning_rate, weight_decay"), ("scheduler", "lr_scheduler_type")):
        if not config.get(block):
            continue
        kind = config[block].get("type") if isinstance(config[block], dict) else config[block]
        if isinstance(kind, str) and kind in gone:
            problem = f"DeepSpeed dropped {kind} in {gone[kind]['since']}"
            yield Finding("ds-removed-optimizer", name, block, problem, f"{gone[kind]['use']} ({gone[kind]['issue']})")
        else:
            problem, cure = (
                f"the recipe owns it, but {shown(kind)} stands here",
                f"remove the block; the recipe's keys are {keys}",
            )
            yield Finding("ds-optimizer", name, block, problem, cure)
    for block in ("tensor_parallel", "sequence_parallel_size", "expert_parallel"):
        if config.get(block) not in (None, 1, {}):
            problem = "train.py shards over data-parallel ranks only"
            yield Finding("ds-parallelism", name, block, problem, "remove the key")


def _keys(config: dict[str, Any], name: str, prefix: str = "") -> Iterator[Finding]:
    known = key_table()
    allowed, removed = known["allowed"], known["removed"]
    for key, value in config.items():
        path = f"{prefix}{key}"
        if path in removed:
            gone = removed[path]
            since = f" (gone since {gone['since']})" if gone["since"] != "older" else ""
            problem = f"DeepSpeed {known['deepspeed']} no longer takes this key{since}: {shown(value, _json)}"
            yield Finding("ds-removed-key", name, path, problem, f"{gone['use']} ({gone['issue']})")
        elif path not in allowed:
            siblings = [k.rsplit(".", 1)[-1] for k in allowed if k.rpartition(".")[0] == prefix.rstrip(".")]
            problem = f"DeepSpeed {known['deepspeed']} knows no such key (its value: {shown(value, _json)})"
            yield Finding("ds-unknown-key", name, path, problem, did_you_mean(str(key), siblings))
        elif allowed[path].get("block") and not isinstance(value, dict):
            problem, cure = f"{shown(value)} stands where a table belongs", f'write "{key}": {{...}}; see ds_configs/'
            yield Finding("ds-not-a-block", name, path, problem, cure)
        elif value == "auto" and not _filled(path):
            default = json.dumps(allowed[path].get("default"))
            problem = f'nobody fills in this "auto": in DeepSpeed\'s typed blocks it becomes the default, {default}'
            yield Finding(
                "ds-auto-not-filled", name, path, problem, "write a value, or remove the line for the default"
            )
        elif isinstance(value, dict) and not allowed[path].get("free"):
            yield from _keys(value, name, f"{path}.")


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _filled(path: str) -> bool:
    """Whether "auto" at this path means something: to Transformers, to Brigade, or to DeepSpeed itself."""
    entry = key_table()["allowed"][path]
    return path in key_table()["owned_by_recipe"] or bool(entry.get("auto")) or entry.get("default") == "auto"


def _stage_and_offload(config: dict[str, Any], name: str) -> Iterator[Finding]:
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else zero
    if type(stage) is not int or stage not in (1, 2, 3):
        problem = f"{shown(stage)} is not 1, 2 or 3"
        yield Finding("ds-stage", name, "zero_optimization.stage", problem, "see ds_configs/README.md")
        return
    for block in ("offload_optimizer", "offload_param"):
        path = f"zero_optimization.{block}"
        device = value_at(config, f"{path}.device", "none")
        if block == "offload_param" and device != "none" and stage != 3:
            problem = f"device {shown(device)} with stage {stage}: DeepSpeed offloads parameters under stage 3 alone"
            yield Finding("ds-offload-stage", name, path, problem, "set stage 3, or remove the block")
        elif device == "nvme" and stage != 3:
            yield Finding("ds-offload-stage", name, path, "NVMe offload needs stage 3", "set stage 3 or cpu")
        elif device == "nvme" and not value_at(config, f"{path}.nvme_path"):
            problem, cure = "device 'nvme' without nvme_path", 'add "nvme_path": "auto", or a directory on the disk'
            yield Finding("ds-nvme-path", name, path, problem, cure)


def against_recipe(config: dict[str, Any], name: str, settings: Settings) -> Iterator[Finding]:
    """Where a ds_config says something else than the recipe of what the recipe owns."""
    training = settings.recipe.training
    owned: dict[str, tuple[str, Any]] = {
        "train_batch_size": ("global_batch_size", training.global_batch_size),
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", training.per_device_train_batch_size),
        "gradient_clipping": ("max_grad_norm", training.max_grad_norm),
        "bf16.enabled": ("bf16", training.bf16),
        "fp16.enabled": ("fp16", training.fp16),
    }
    for path, (key, wanted) in owned.items():
        value = value_at(config, path, "auto")
        if value != "auto" and value != wanted:
            problem = (
                f"{shown(value)} here, but {key} is {wanted!r} in {settings.sources.get(key, settings.recipe_path)}"
            )
            cure = f'write "auto" in the ds_config and set {key} in the recipe'
            yield Finding("ds-contradicts-recipe", name, path, problem, cure)
