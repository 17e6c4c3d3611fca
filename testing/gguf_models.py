"""Tiny random models of the families that `export --gguf` writes, as Hugging Face directories."""

from pathlib import Path
from typing import Any

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied": {"model_type": "llama", "head_dim": 32},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}
# Transformers reads GGUF files without their scaled rotary embeddings.
SCALED: dict[str, dict[str, Any]] = {
    "llama-linear": {"model_type": "llama", "rope": {"rope_type": "linear", "factor": 4.0}},
    "llama-llama3": {"model_type": "llama", "rope": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope": YARN},
    "qwen2-yarn": {"model_type": "qwen2", "rope": YARN},
    "qwen3-yarn": {"model_type": "qwen3", "head_dim": 32, "rope": YARN},
}


def config_of(model_type: str, rope: dict[str, Any] | None = None, **keys: Any) -> Any:
    """Return the configuration of a model with 4 heads, 2 of keys, and more rows of embeddings than the tokenizer has tokens."""
    from transformers import AutoConfig

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 4104, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    parameters = {"rope_theta": 20000.0} | (rope or {"rope_type": "default"})
    defaults = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    return AutoConfig.for_model(model_type, **(shape | defaults | {"rope_parameters": parameters} | keys))


def save(folder: Path, **case: Any) -> Path:
    """Write a model with weights far enough from zero that each of them shows in its logits, and the built-in tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from brigade.train.data import builtin

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(**case))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
            if weight.dim() == 1:
                weight += 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(builtin.TOKENIZER).save_pretrained(folder)
    return folder
