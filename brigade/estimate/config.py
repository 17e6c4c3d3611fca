"""A model's dimensions from a Hugging Face config.json. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .shape import FAMILIES, LLAMA, Family, ModelShape

# Other names that config classes have for the same number.
ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": (),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts_per_layer"),
    "num_experts_per_tok": ("experts_per_token", "moe_topk", "num_experts_per_token"),
    "moe_intermediate_size": (),
}


def read_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises UserError for a file that is none."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            str(path), f"it cannot be read: {error.strerror}", "name a model's folder or config.json"
        ) from None
    except ValueError as error:
        raise UserError(
            str(path), f"not JSON: {error}", "take the config.json that was published with the model"
        ) from None
    if not isinstance(config, dict):
        raise UserError(str(path), f"holds {type(config).__name__}, not keys and values", "name a model's config.json")
    return config


def shape_of(config: Mapping[str, Any], place: str, name: str = "") -> ModelShape:
    """The dimensions that a config.json states.

    Raises UserError at `place` for a model_type whose layers are not known here, or a field that is not there.
    """
    text = config.get("text_config") or config
    kind = str(text.get("model_type", config.get("model_type", "")))
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"{place}: model_type", f"{kind!r} is not known to the formulas", f"known: {known}; or use --trace"
        )
    family = FAMILIES[kind]

    def number(key: str, default: int | None = None) -> int:
        for alias in (key, *ALIASES.get(key, ())):
            if text.get(alias) is not None:
                value = text[alias]
                if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                    raise UserError(f"{place}: {alias}", f"{value!r} is not a whole number above 0", "mend the config")
                return value
        default = dict(family.defaults).get(key, default)
        if default is None:
            raise UserError(
                f"{place}: {key}", "the config does not state it", "take the config.json published with the model"
            )
        return default

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    experts = number("num_experts", 0) if any(text.get(k) for k in ("num_experts", *ALIASES["num_experts"])) else 0
    ffn = number("intermediate_size", 4 * hidden if not family.gated else None)
    head_dim = number("head_dim", hidden // heads)
    window, windowed = _windows(text, layers)
    moe_layers = _moe_layers(text, layers) if experts else 0
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        name or str(config.get("_name_or_path") or kind), layers, hidden, ffn, heads,
        number("num_key_value_heads", heads), head_dim, number("vocab_size"),
        tied=family.tied if tied is None else bool(tied), family=_switched(family, text),
        experts=experts, top_k=number("num_experts_per_tok") if experts else 0,
        expert_ffn=number("moe_intermediate_size", ffn) if experts else 0,
        shared_ffn=int(text.get("shared_expert_intermediate_size") or 0) if experts else 0,
        moe_layers=moe_layers, window=window, windowed_layers=windowed,
        other=_vision(config.get("vision_config"), hidden),
    )  # fmt: skip


def _switched(family: Family, text: Mapping[str, Any]) -> Family:
    """The family, with the biases that a config may switch on."""
    from dataclasses import replace

    if family is not LLAMA:
        return family
    attention = bool(text.get("attention_bias"))
    return replace(family, qkv_bias=attention, out_bias=attention, mlp_bias=bool(text.get("mlp_bias")))


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """The sliding window, and how many layers have it."""
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return 0, 0
    if isinstance(text.get("layer_types"), list):
        return int(window), sum(kind == "sliding_attention" for kind in text["layer_types"])
    pattern = text.get("sliding_window_pattern") or (6 if text.get("model_type") == "gemma3_text" else 1)
    return int(window), layers if pattern == 1 else layers - layers // int(pattern)


def _moe_layers(text: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts: `decoder_sparse_step` and `mlp_only_layers` as Qwen's configs have them."""
    step, dense = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or ())
    return sum(1 for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)


def _vision(vision: Mapping[str, Any] | None, hidden: int) -> int:
    """Parameters of a SigLIP tower and its projection, which Gemma 3 carries beside its text model."""
    if not vision:
        return 0
    width, ffn = int(vision["hidden_size"]), int(vision["intermediate_size"])
    patch = int(vision["patch_size"])
    layer = 4 * (width * width + width) + 2 * width * ffn + ffn + width + 4 * width
    positions = (int(vision["image_size"]) // patch) ** 2
    embeddings = width * 3 * patch * patch + width + positions * width
    return int(vision["num_hidden_layers"]) * layer + embeddings + 2 * width + width * hidden + width
