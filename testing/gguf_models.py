"""Tiny random models of the families that `export --gguf` writes, as Hugging Face directories."""

import json
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
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES | {"use_regex": False}]}


# As published in the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen2, by the name that llama.cpp gives it.
PRE_TOKENIZERS = {
    "gpt-2": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
    "llama-bpe": _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied": {"model_type": "llama", "head_dim": 32, "pre": "llama-bpe"},
    "qwen2": {"model_type": "qwen2", "pre": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "pre": "qwen2"},
}
# Transformers reads GGUF files without their scaled rotary embeddings, and Qwen3 with heads of 128 dimensions only.
SCALED: dict[str, dict[str, Any]] = {
    "llama-linear": {"model_type": "llama", "pre": "smollm", "rope": {"rope_type": "linear", "factor": 4.0}},
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


def save(folder: Path, pre: str = "gpt-2", **case: Any) -> Path:
    """Write a model with weights far enough from zero that each of them shows in its logits, and the built-in tokenizer.

    pre: the pre-tokenizer that this one gets, of PRE_TOKENIZERS
    """
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
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["pre_tokenizer"] = PRE_TOKENIZERS[pre]
    document["model"]["ignore_merges"] = pre == "llama-bpe"
    path.write_text(json.dumps(document))
    return folder
