"""Any architecture in tiny sizes: for rehearsals, and to try out on a CPU what a model does."""

from __future__ import annotations

import re
from typing import Any

from . import per_layer
from .per_layer import Config

VOCABULARY = 4096  # of the built-in tokenizer

# Sizes of a rehearsed model. Keys that a config does not have are left out; its other keys stay as they are.
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_experts": 4, "num_local_experts": 4, "vocab_size": VOCABULARY, "rotary_dim": 8,
    "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    "n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4,  # GPT-2's names, and BLOOM's
    "d_model": 64, "ffn_dim": 128, "ffn_hidden_size": 128, "word_embed_proj_dim": 64,  # OPT's, XGLM's and MPT's
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,  # DeepSeek's
    "n_routed_experts": 4, "zero_expert_num": 4, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "top_k_experts": 2,
    "global_head_dim": 32, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,  # Gemma's
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "num_heads": 8,  # twice the hidden size together
    "mamba_num_heads": 8, "mamba_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 16,  # linear attention's
    "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16,  # Zamba's
    "embedding_dim": 64,  # xLSTM's
    "out_hidden_size": 64, "embed_dim": 64,  # of a vision tower
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def shrink(config: Config, divisor: int = 1, layers: int = TINY["num_hidden_layers"]) -> Config:
    """Return the config of the same architecture with tiny sizes and a layer of each kind. The ratio of query heads to key-value
    heads stays, as far as `divisor` ranks can divide the latter.

    layers: the least number of them
    """
    # Random weights are not quantised, whatever the published ones are (gpt-oss has MXFP4).
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    of_layers = per_layer.cut(config, per_layer.representatives(config, layers))
    # A part that the model does not have is None or 0.
    tiny: dict[str, Any] = {key: TINY.get(key, value) if value else value for key, value in config.items()}
    tiny |= {key: _of_layers(key, value, config, divisor) for key, value in of_layers.items()}
    tiny |= _change({"num_key_value_heads": config.get("num_key_value_heads")}, config, divisor)
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        tiny["word_embed_proj_dim"] //= 2  # projections lie between the two
    for key in tiny.keys() & {"num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"}:
        tiny[key] = config[key] and min(TINY[key], config[key])  # some routers choose a single one
    if "qk_head_dim" in tiny and {"qk_nope_head_dim", "qk_rope_head_dim"} <= tiny.keys():
        tiny["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    tiny["vocab_size"] = VOCABULARY
    for key in tiny.keys() & {"rope_parameters", "rope_scaling"}:
        tiny[key] = _with_fewer_positions(tiny[key], tiny)
    if isinstance(config.get("text_config"), dict):
        tiny["text_config"] = shrink(config["text_config"], divisor, layers)
    for key in tiny.keys() & {"vision_config", "audio_config"}:
        if config[key]:
            tiny[key] = {name: TINY.get(name, value) for name, value in config[key].items()}
            if config.get("vision_feature_layer") is not None and "num_hidden_layers" in config[key]:  # some are chosen
                tiny[key]["num_hidden_layers"] = config[key]["num_hidden_layers"]
            # Llama 4's layers have the inner width of the adapter behind them.
            ratio = config[key].get("pixel_shuffle_ratio")
            if ratio:
                tiny[key]["intermediate_size"] = int(TINY["hidden_size"] / ratio**2)
    return tiny | {key: TINY[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


_SPANS = re.compile(
    r"(window|window_size|window_len|chunk_size|block_size|local_attention|index_topk(_blocks)?|floor_scale)$"
)
SPAN = 8


def with_short_spans(config: Config) -> Config:
    """Return a config whose layers look back at most SPAN tokens unless they see all tokens, compress that many into one, and
    treat tokens after that many differently (Llama 4's floor_scale)."""
    short: dict[str, Any] = {
        key: min(value, SPAN) for key, value in config.items() if _SPANS.search(key) and isinstance(value, int)
    }
    rates = config.get("compress_rates")
    if isinstance(rates, dict):
        short["compress_rates"] = {kind: min(rate, SPAN) for kind, rate in rates.items()}
    text = config.get("text_config")
    if isinstance(text, dict):
        short["text_config"] = with_short_spans(text)
    return config | short


def _with_fewer_positions(rope: Any, tiny: Config) -> Config | None:
    """Return the rotary embedding of a tiny model. Where it divides a head among time, height and width (M-RoPE), the parts are a
    tiny head's."""
    sections = rope.get("mrope_section") if isinstance(rope, dict) and not rope.get("mrope_interleaved") else None
    if not sections:
        return rope
    half = (tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]) // 2
    others = [half * section // sum(sections) for section in sections[1:]]
    return rope | {"mrope_section": [half - sum(others), *others]}


def _of_layers(key: str, value: Any, config: Config, divisor: int) -> object:
    """Return the value of a key that tells about single layers, as per_layer.cut() has left it, with tiny sizes."""
    if key == per_layer.CHANGES:
        return {number: _change(change, config, divisor) for number, change in value.items()}
    if key in per_layer.NESTED:
        return {name: TINY.get(name, number) for name, number in value.items()}
    if isinstance(value, list):
        return [_scaled(key.removesuffix("_per_layer"), each, config) for each in value]
    return value


def _change(change: Config, config: Config, divisor: int) -> Config:
    """Return the changes to a layer with tiny sizes."""
    tiny = {key: _scaled(key, value, config) for key, value in change.items() if value is not None}
    heads = (config | change).get("num_attention_heads")
    shared = tiny.get("num_key_value_heads")
    if heads and shared:
        wanted = tiny.get("num_attention_heads", TINY["num_attention_heads"])
        tiny["num_key_value_heads"] = max(divisor, wanted * shared // heads)
    return tiny


def _scaled(key: str, value: object, config: Config) -> Any:
    """Return a layer's own size: tiny, but larger than the others' where it was larger."""
    if key not in TINY or not isinstance(value, int) or isinstance(value, bool):
        return value
    others = config.get(key)
    return TINY[key] * -(-value // others) if isinstance(others, int) else TINY[key]
