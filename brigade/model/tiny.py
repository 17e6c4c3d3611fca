"""Any architecture with tiny sizes: for rehearsals, and to try out on a CPU what a model does."""

from typing import Any

VOCABULARY = 4096  # of the built-in tokenizer

# Sizes of a rehearsed model. What a config does not have is left out; everything else of it stays as it is.
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    "n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4,  # GPT-2's names, and BLOOM's
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,  # DeepSeek's
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def shrink(config: dict[str, Any], divisor: int = 1, layers: int = TINY["num_hidden_layers"]) -> dict[str, Any]:
    """The same architecture with tiny sizes; the ratio of query heads to key-value heads is kept, as far as `divisor` ranks can
    divide the latter."""
    sizes = TINY | {"num_hidden_layers": layers, "n_layer": layers}
    # Random weights are in no published quantisation (gpt-oss has MXFP4).
    tiny = {key: sizes.get(key, value) for key, value in config.items() if key != "quantization_config"}
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and shared:
        tiny["num_key_value_heads"] = max(divisor, TINY["num_attention_heads"] * shared // heads)
    if isinstance(config.get("layer_types"), list):
        tiny["layer_types"] = config["layer_types"][:layers]
    tiny["vocab_size"] = VOCABULARY
    if isinstance(config.get("text_config"), dict):
        tiny["text_config"] = shrink(config["text_config"], divisor, layers)
    for key in tiny.keys() & {"vision_config", "audio_config"}:
        tiny[key] = {name: TINY.get(name, value) for name, value in (config[key] or {}).items()}
    return tiny | {key: TINY[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
