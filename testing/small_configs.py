"""Sizes of small models, as config.json says them."""

from typing import Any

LENGTH = 512
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
LEAST: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPARSE = {"num_local_experts": 8, "num_experts_per_tok": 2}
OLD = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
NEOX = OLD | {"intermediate_size": 256}


def config(family: str = "llama", **values: Any) -> dict[str, Any]:
    """Return a small model's config.json."""
    return {"model_type": family, **SMALL, **values}
