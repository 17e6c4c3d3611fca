"""ds_configs: reading, checking against DeepSpeed's keys and the recipe, and filling Brigade's own "auto"s.

`judge` and `against_recipe` are the rules over a ds_config, for lint, `launch` and the run alike; what only lint says of
one is in lint/ds_config.py.
"""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import UserError, shown
from ...errors.findings import Finding, raise_first
from ...errors.tables import Document, Fields
from ..recipe.files import TWICE, find, text_of
from ..recipe.settings import Settings
from .axes import without
from .axis_keys import wrong_sizes
from .ds_keys import as_json, key_table, leaves, read_keys, value_at

TORCHS_ADAMW = ("adamw_torch", "adamw_torch_fused")  # of which DeepSpeed's CPU Adam is a faster form
_FP32 = ("fp32", "torch.float32", "float32", "float")


def read(source: str | Fields, place: str) -> tuple[str, Fields]:
    """Name and content of a ds_config, from a file or given inline (as in run.yaml). Raise UserError."""
    if isinstance(source, dict):
        return place, copy.deepcopy(source)
    path = find(source, place, "ds_config")

    def each_key_once(pairs: list[tuple[str, object]]) -> Fields:
        """Refuse a key that stands twice, as DeepSpeed does: Python's own JSON takes the last one."""
        keys = [key for key, _ in pairs]
        key = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
        if key:
            raise UserError(f"{source}: {key}", f"the key {TWICE}", "keep one of them")
        return dict(pairs)

    try:
        config = json.loads(text_of(path), object_pairs_hook=each_key_once)
    except (ValueError, OSError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        problem = f"not JSON: {getattr(error, 'msg', error)}"
        raise UserError(f"{source}{line}", problem, "fix that line, or start from ds_configs/") from None
    if not isinstance(config, dict):
        raise UserError(source, f"{shown(config, as_json)} is not an object", "start from ds_configs/zero3.json")
    return source, config


def check(config: Document, name: str, settings: Settings) -> Fields:
    """The ds_config under DeepSpeed's first names, checked against DeepSpeed and the recipe, with the owned keys that it
    lacks as "auto".

    (A key that is absent is not filled by Transformers: without gradient_clipping DeepSpeed clips at 1.0 whatever
    max_grad_norm says.) Raises UserError with file, key, both values and the cure.
    """
    config, findings = judge(config, name)
    raise_first(itertools.chain(findings, against_recipe(config, name, settings)))
    for path in owned_values():
        block, _, key = path.rpartition(".")
        (config.setdefault(block, {}) if block else config).setdefault(key, "auto")
    return config


def fill(
    config: Fields,
    local_world_size: int,
    nvme_path: Path,
    optim: str,
    largest_shard: int = 10**8,
    output: Path = Path(),
) -> Fields:
    """A copy with Brigade's own "auto"s replaced; Transformers fills those that the recipe owns.

    zero_hpz_partition_size: the ranks of one host; nvme_path: `nvme_path`; offload_param.buffer_size: `largest_shard`,
    elements of the largest parameter's shard (DeepSpeed makes five such buffers per rank). What DeepSpeed writes by itself
    goes into `output`, the run's directory. And unless `optim` is torch's AdamW, keep it: accelerate replaces any optimizer by
    DeepSpeedCPUAdam where states are offloaded, silently, and one of 8 bits by an Adam whose decay is not AdamW's
    (utils/deepspeed.py: map_pytorch_optim_to_deepspeed). DeepSpeed's throughput timer is off unless the file turns it on: it
    waits for the whole device at the beginning of each micro-step and at the end of each step (utils/timer.py:
    ThroughputTimer.start).
    """
    filled = copy.deepcopy(config)
    filled.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    if optim not in TORCHS_ADAMW:
        filled.setdefault("zero_force_ds_cpu_optimizer", False)
    for path in ("flops_profiler.output_file", "tensorboard.output_path", "csv_monitor.output_path"):
        block, key = path.split(".")
        if value_at(filled, f"{block}.enabled") and (key != "output_file" or filled[block].get(key)):
            filled[block][key] = str(output / filled[block].get(key, ""))
    values = {"zero_hpz_partition_size": local_world_size, "nvme_path": str(nvme_path), "buffer_size": largest_shard}
    zero = filled["zero_optimization"]
    for block in (zero, zero.get("offload_param", {}), zero.get("offload_optimizer", {})):
        block.update({key: value for key, value in values.items() if block.get(key) == "auto"})
    return filled


def swaps_to_nvme(config: Document) -> bool:
    """Whether a ds_config offloads parameters or optimizer states to NVMe."""
    blocks = ("offload_param", "offload_optimizer")
    return any(value_at(config, f"zero_optimization.{block}.device") == "nvme" for block in blocks)


def offloads_states(config: Document) -> bool:
    """Whether a ds_config offloads optimizer states, to the host's memory or to NVMe: the device may be "none"."""
    return value_at(config, "zero_optimization.offload_optimizer.device", "none") != "none"


def is_quantised(config: Document) -> bool:
    """ZeRO++'s quantised weights or gradients, whose kernels need CUDA."""
    zero = config["zero_optimization"]
    return any(zero.get(f"zero_quantized_{what}") for what in ("weights", "gradients", "nontrainable_weights"))


def owned_values() -> dict[str, str]:
    """Path in a ds_config -> the recipe's key that decides the value; optimizer and scheduler aside, refused as a whole."""
    owned = key_table()["owned_by_recipe"].items()
    return {path: key for path, key in owned if not path.startswith(("optimizer", "scheduler"))}


def judge(config: Document, name: str) -> tuple[Fields, list[Finding]]:
    """A ds_config as DeepSpeed understands it, and what is wrong with it whatever the recipe says.

    Each key has its first name in ds_keys.yaml, whatever spelling the file has, and a text has the type that DeepSpeed
    reads in it, so that all who read it later (Transformers, accelerate, a run's identity) see one form.
    """
    found: list[Finding] = []
    config = read_keys(config, name, found)
    stage = config.get("zero_optimization", {}).get("stage")
    if type(stage) is not int or stage not in (1, 2, 3):
        found.append(Finding.of("ds-stage", name, "zero_optimization.stage", value=shown(stage)))
    found += [*_unread(config, name), *_together(config, name), *_owned(config, name)]
    found += [*_writes_elsewhere(config, name), *_imports(config, name)]
    return config, found


def _writes_elsewhere(config: Document, name: str) -> Iterator[Finding]:
    """Paths that lead out of the run's output directory, in which DeepSpeed's own files lie."""
    for at in key_table()["written"]:
        path = Path(str(value_at(config, at) or ""))
        if path.is_absolute() or ".." in path.parts or str(path).startswith("~"):
            yield Finding.of("ds-writes-elsewhere", name, at, value=shown(str(path), as_json))


def _imports(config: Document, name: str) -> Iterator[Finding]:
    """Modules that DeepSpeed would import, and that are no package of its own or of what trains here."""
    for at, packages in key_table()["imported"].items():
        strangers = [str(each) for each in value_at(config, at) or () if str(each).split(".")[0] not in packages]
        if strangers:
            yield Finding.of("ds-imports", name, at, value=shown(strangers[0]), packages=", ".join(packages))


def _owned(config: Document, name: str) -> Iterator[Finding]:
    """What only the recipe decides."""
    key = "gradient_accumulation_steps"
    value = config.get(key, "auto")
    if value != "auto":
        yield Finding.of("ds-accumulation", name, key, value=shown(value))
    gone = key_table()["removed_optimizers"]
    for block, keys in (("optimizer", "optim, learning_rate, weight_decay"), ("scheduler", "lr_scheduler_type")):
        if not config.get(block):
            continue
        kind = config[block].get("type") if isinstance(config[block], dict) else config[block]
        if isinstance(kind, str) and kind in gone:
            yield Finding.of("ds-removed-optimizer", name, block, kind=kind, **gone[kind])
        else:
            yield Finding.of("ds-optimizer", name, block, value=shown(kind), keys=keys)
    if without(config) != config:
        yield from wrong_sizes(config, name)


def _unread(config: Document, name: str) -> Iterator[Finding]:
    """What DeepSpeed knows and nothing in a run reads: one finding for each key, or block that is not switched off."""
    allowed = key_table()["allowed"]
    for at, entry in key_table()["unread"].items():
        parent, _, key = at.rpartition(".")
        block = value_at(config, parent, {}) if parent else config
        switch = allowed.get(f"{at}.enabled", {"default": True})["default"]
        if key not in block or not value_at(block, f"{key}.enabled", switch):
            continue
        values = [
            f"{path} {shown(value, as_json)}"
            for path, value in leaves({key: block[key]}, f"{parent}." if parent else "")
            if value != allowed[path]["default"] and path.rpartition(".")[2] not in entry.get("but", ())
        ]
        if values:
            yield Finding.of("ds-unread", name, at, first=", ".join(values), cure=entry["use"])


def _together(config: Document, name: str) -> Iterator[Finding]:
    """Values that DeepSpeed refuses together."""
    known = key_table()

    def value(path: str) -> Any:  # an owned key that is absent is added as "auto"
        return value_at(config, path, "auto" if path in known["owned_by_recipe"] else known["allowed"][path]["default"])

    for entry in known["refused_together"]:
        values = {path: value(path) for path in entry["keys"]}
        if all(holds(values[path], wanted) for path, wanted in entry["keys"].items()):
            first, *others = (f"{path} {shown(value, as_json)}" for path, value in values.items())
            rule, texts = entry.get("rule", "ds-refused-together"), {"first": first, "others": " and ".join(others)}
            yield Finding.of(rule, name, next(iter(values)), **entry, **texts)


def holds(value: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one, or relates to another as in {not: x}, {below: x}, {above: x}."""
    relation, other = next(iter(wanted.items())) if isinstance(wanted, dict) else ("is", wanted)
    if relation in ("is", "not"):
        return (value == other and isinstance(value, bool) is isinstance(other, bool)) is (relation == "is")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (value < other if relation == "below" else value > other)


def against_recipe(config: Document, name: str, settings: Settings) -> Iterator[Finding]:
    """Where a ds_config says something else than the recipe of what the recipe owns."""
    training, cluster = settings.recipe.training, settings.recipe.cluster
    owned = [(path, key, getattr(training, key)) for path, key in owned_values().items() if hasattr(training, key)]
    for block in ("offload_param", "offload_optimizer"):
        at = f"zero_optimization.{block}"
        if cluster.nvme_path and value_at(config, f"{at}.device") == "nvme":
            owned.append((f"{at}.nvme_path", "nvme_path", str(Path(cluster.nvme_path))))
    for path, key, wanted in owned:
        value = value_at(config, path, "auto")
        value = str(Path(value)) if key == "nvme_path" else value
        if value not in ("auto", wanted):
            source = settings.sources.get(key, settings.recipe_path)
            values = {"value": shown(value), "key": key, "wanted": wanted, "source": source}
            yield Finding.of("ds-contradicts-recipe", name, path, **values)
    offloads, zero1 = offloads_states(config), value_at(config, "zero_optimization.stage") == 1
    in_fp32 = value_at(config, "data_types.grad_accum_dtype")
    for path, contradicts, problem, cure in (
        ("gradient_allreduce_op", value_at(config, "gradient_allreduce_op") == "sum",
         "sum adds up the gradients of all ranks, but the recipe's learning rate is for their mean", "remove the line"),
        ("torch_autocast.enabled", value_at(config, "torch_autocast.enabled") is True,
         "true here, which computes in half precision whatever the recipe says",
         "remove the block, and set bf16: true in the recipe"),
        # runtime/engine.py: _do_optimizer_sanity_check
        ("data_types.grad_accum_dtype", training.bf16 and zero1 and not offloads and in_fp32 in _FP32,
         f"{in_fp32} here and bf16 in the recipe: ZeRO-1 would take BF16_Optimizer, whose shards no other number of ranks reads",
         "remove the line"),
        ("zero_force_ds_cpu_optimizer",
         config.get("zero_force_ds_cpu_optimizer") is True and offloads and training.optim not in TORCHS_ADAMW,
         f"true here, which puts DeepSpeed's CPU Adam in the place of the recipe's {training.optim}",
         "remove the line, or set optim: adamw_torch_fused"),
    ):  # fmt: skip
        if contradicts:
            yield Finding("ds-contradicts-recipe", name, path, problem, cure)
