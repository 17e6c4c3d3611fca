"""What a config says about single layers, and how to keep only some of them: the one place that knows such keys. No torch.

A config names a layer's kind in many ways: a list with an entry for each layer (`layer_types`), layers' numbers
(`mlp_only_layers`), how many of the first or the last layers are of a kind (`first_k_dense_replace`, `num_kv_shared_layers`),
changes to single layers (`per_layer_config`), or a period.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Config = dict[str, Any]

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
# Lists of layers' numbers, and the number of the first layer.
NUMBERS = {
    "mlp_only_layers": 0, "moe_layers": 0, "full_attn_idxs": 0, "hybrid_layer_ids": 0, "cross_attention_layers": 0,
    "attn_layer_indices": 0,
    "full_attn_layers": 1, "kda_layers": 1,
}  # fmt: skip
# How many of the first layers, and of the last, are of a kind of their own.
FIRST = ("first_k_dense_replace", "num_dense_layers", "num_hash_layers", "moe_layer_start_index", "max_window_layers")
LAST = ("num_kv_shared_layers",)
# Every n-th layer is of another kind, by the key of n; the value is the key of the offset, if there is one.
EVERY = {
    "decoder_sparse_step": "", "interleave_moe_layer_step": "", "full_attention_interval": "", "no_rope_layer_interval": "",
    "global_attn_every_n_layers": "", "sliding_window_pattern": "", "_sliding_window_pattern": "", "layer_group_size": "",
    "attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset",
}  # fmt: skip
CHANGES, NESTED = "per_layer_config", ("linear_attn_config",)
# Lists that have nothing to do with layers, even where they are as long as the model is deep.
NO_LAYERS = ("architectures", "attention_types", "time_step_limit", "mlp_multipliers", "ssm_multipliers")
SIZES = ("size", "dim", "heads", "rank", "experts", "heads_per_layer")  # the last word of a key that holds a size
MOST = 4  # different values of a list of numbers that tell kinds; with more of them they are sizes


def layer_count(config: Config) -> int | None:
    """Return the number of decoder layers, or None where the config does not tell."""
    counts = (config[key] for key in COUNTS if isinstance(config.get(key), int))
    return next(counts, len(config.get("layers_block_type") or ()) or None)


def representatives(config: Config, least: int = 1) -> list[int]:
    """Return the number of one layer of each kind, in the model's order, and of further ones where these are fewer than
    `least`."""
    count = layer_count(config) or least
    first: dict[str, int] = {}
    for number, kind in enumerate(_kinds(config, count)):
        first.setdefault(kind, number)
    chosen = sorted(first.values())
    others = (number for number in range(count) if number not in chosen)
    chosen = sorted(chosen + list(itertools.islice(others, max(0, least - len(chosen)))))
    return chosen + [count - 1] * (least - len(chosen))


def cut(config: Config, chosen: Sequence[int]) -> Config:
    """Return the keys of a config that change, with their new values, where its model keeps only these layers."""
    count = layer_count(config)
    if count is None:
        return {}
    new: Config = {key: len(chosen) for key in COUNTS if isinstance(config.get(key), int)}
    for key, value in config.items():
        if key in NUMBERS and isinstance(value, list):
            base = NUMBERS[key]
            new[key] = [place + base for place, number in enumerate(chosen) if number + base in value]
        elif _is_listed(key, value, count):
            new[key] = [value[number] for number in chosen]
        elif key in FIRST and isinstance(value, int):
            new[key] = sum(number < value for number in chosen)
        elif key in LAST and isinstance(value, int):
            new[key] = sum(number >= count - value for number in chosen)
        elif key in EVERY and isinstance(value, int):
            new[key] = min(value, 2)
            offset = EVERY[key]
            if offset in config:
                new[offset] = min(config[offset], new[key] - 1)
        elif key in NESTED and isinstance(value, dict):
            new[key] = value | cut({COUNTS[0]: count} | value, chosen)
            del new[key][COUNTS[0]]
    last = config.get("moe_layer_end_index")
    if isinstance(last, int) and last >= 0:
        new["moe_layer_end_index"] = sum(number <= last for number in chosen) - 1
    changes = config.get(CHANGES)
    if changes:
        by_number = {int(number): change for number, change in changes.items()}
        new[CHANGES] = {str(n): by_number[number] for n, number in enumerate(chosen) if number in by_number}
    if "attention_types" in config and "attention_layers" in new:  # GPT-Neo's, which have to agree
        new["attention_types"] = [[new["attention_layers"], 1]]
    return new


def each_layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return Transformers' config of each layer, or the one that all layers share. `config` itself raises an error when asked for
    a size that differs between layers (Gemma 4's head_dim)."""
    return list(config.per_layer_config) if config.is_heterogeneous else [config]


def common(config: PreTrainedConfig, key: str) -> Any:
    """Return what a config of Transformers says of all its layers, as its config.json has it; None where it does not."""
    return config.to_dict().get(key) if config.is_heterogeneous else getattr(config, key, None)


def widest_head(config: PreTrainedConfig) -> int:
    """Return the width of the widest heads of any layer, by a config of Transformers; 0 where it does not say."""
    return max(getattr(layer, "head_dim", None) or 0 for layer in each_layers(config))


def sizes_that_differ(config: Config) -> list[str]:
    """Return the keys of sizes that differ between layers, such as a head's or the number of heads."""
    count = layer_count(config)
    keys = {key for change in (config.get(CHANGES) or {}).values() for key in change}
    for key, value in config.items() if count else ():
        if _is_listed(key, value, count) and key.endswith(SIZES) and len({*map(str, value)}) > 1:
            keys.add(key)
    return sorted(keys)


def _is_listed(key: str, value: object, count: int | None) -> bool:
    """Whether a list has an entry for each of `count` layers."""
    if not isinstance(value, list) or len(value) != count or key in NO_LAYERS or key in NUMBERS:
        return False
    return not key.startswith("mtp_") and not key.endswith("_token_id")


def _kinds(config: Config, count: int) -> Iterator[str]:
    """Yield what the config says about each layer, as a text: equal texts are layers of one kind."""
    lists = [value for key, value in config.items() if _is_listed(key, value, count)]
    lists = [
        value for value in lists if len({*map(str, value)}) <= MOST or any(isinstance(entry, str) for entry in value)
    ]
    nested = [part for part in map(config.get, NESTED) if isinstance(part, dict)]
    numbers = [
        (part[key], base)
        for part in (config, *nested)
        for key, base in NUMBERS.items()
        if isinstance(part.get(key), list)
    ]
    bounds = [config[key] for key in FIRST if isinstance(config.get(key), int)]
    bounds += [count - config[key] for key in LAST if isinstance(config.get(key), int)]
    last = config.get("moe_layer_end_index")
    if isinstance(last, int) and last >= 0:
        bounds.append(last + 1)
    changes = {int(number): change for number, change in (config.get(CHANGES) or {}).items()}
    for layer in range(count):
        told = [
            [value[layer] for value in lists],
            [layer + base in value for value, base in numbers],
            [layer < bound for bound in bounds],
            changes.get(layer),
        ]
        yield json.dumps(told, sort_keys=True, default=str)
