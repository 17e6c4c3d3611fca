"""A model's config.json: reading it, other names of its keys, and which models are causal language models. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, shown
from .. import upstream
from .parts import takes_images

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .per_layer import Config


# Other names that config classes have for the same number.
ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": (),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts_per_layer"),
    "num_experts_per_tok": ("experts_per_token", "moe_topk", "num_experts_per_token", "top_k_experts"),
    "moe_intermediate_size": (),
}

# How many layers predict further tokens: DeepSeek-V3, GLM-4.5 and most others; Qwen3.5; Transformers; MiniMax-M2; Megatron.
PREDICTING = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_layers",
)
MULTIPLE = 64  # of rows, as a GPU's kernels and tensor groups want them


def read_config(path: Path) -> Config:
    """Read a config.json. Raises UserError for a file that is none."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
        raise UserError(str(path), problem, "name a model's folder or config.json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), f"not JSON: {error}", "take the config.json published with the model") from None
    if not isinstance(config, dict):
        raise UserError(str(path), f"{shown(config)} is not keys and values", "name a model's config.json")
    return config


def grown_vocabulary(words: int, needed: int) -> int:
    """Return the size of a vocabulary of `words` tokens once it has to have `needed`: of more rows, a multiple of 64."""
    return words if needed <= words else -(-needed // MULTIPLE) * MULTIPLE


def with_vocabulary(config: Config, words: int) -> Config:
    """Return a config.json with another size of the vocabulary."""
    text = config.get("text_config")
    if isinstance(text, dict):
        return config | {"text_config": text | {"vocab_size": words}}
    return config | {"vocab_size": words}


def prediction_layers(config: Config) -> int:
    """Return how many layers for multi-token prediction a config.json counts, itself or in a part of it."""
    inside = [prediction_layers(part) for part in config.values() if isinstance(part, dict)]
    return max([0, *inside, *(config[key] for key in PREDICTING if isinstance(config.get(key), int))])


def without_prediction_layers(config: Config) -> Config:
    """Return a config.json that counts no layers for multi-token prediction."""
    return {
        key: without_prediction_layers(value)
        if isinstance(value, dict)
        else 0
        if key in PREDICTING and isinstance(value, int)
        else value
        for key, value in config.items()
    }


def with_dtype(config: Config, dtype: str) -> Config:
    """Return a config.json of weights in another precision ("bfloat16"), which each part of it names."""
    return {
        key: with_dtype(value, dtype) if isinstance(value, dict) else dtype if key == "dtype" and value else value
        for key, value in config.items()
    }


def published_quantization(folder: Path) -> str | None:
    """Return how the weights in a folder are quantised, by Transformers' name ("mxfp4", "gptq"), or None."""
    return (read_config(folder).get("quantization_config") or {}).get("quant_method")


def check_causal(config: PreTrainedConfig, place: str) -> None:
    """Raise UserError at `place` where a Transformers configuration describes no causal language model.

    AutoModelForCausalLM builds encoders and the decoders of speech models too (BertLMHeadModel, WhisperForCausalLM).
    """
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    encodes = getattr(config, "is_encoder_decoder", False) or kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    description = _described(config) if encodes or kind not in upstream.causal_models() else ""
    if description:
        problem = f"train.py trains causal language models, and {kind!r} {description}"
        cure = "name a decoder, such as Qwen/Qwen3-8B"
        if takes_images(config):
            cure = f"train it with data.images: true, plan it with --images-per-sample, or {cure}"
        raise UserError(place, problem, cure)


def _described(config: PreTrainedConfig) -> str:
    """Return in words what a model is if it is an encoder or another model that is not a causal language model; "" for one that
    is a causal language model."""
    from transformers.models.auto import modeling_auto as auto

    kind, is_decoder = config.model_type, getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if getattr(config, "is_encoder_decoder", False) and not is_decoder:
        return "has an encoder and a decoder"
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        return "is an encoder"
    if kind in upstream.causal_models() or getattr(config, "auto_map", None):
        return ""
    if kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return ""  # a class of the user's (AutoModelForCausalLM.register)
    kinds = {
        "reads images and text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "compares images and text": auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "is a speech model": {**auto.MODEL_FOR_CTC_MAPPING_NAMES, **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES},
        "is a vision model": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    return next((words for words, names in kinds.items() if kind in names), "is none, as Transformers knows it")
