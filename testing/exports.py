"""Runs whose checkpoints are exported: name -> strategy, flags, tier. Those of FOUR take four ranks, the others two."""

import pytest

from .command_line import as_flags

LORA = ["--use_peft", "--learning_rate", "2", "--lora_target_modules", "q_proj,v_proj,gate_proj"]
WHOLE = ["--use_peft", "--learning_rate", "0.3", "--lora_modules_to_save", "norm"]
TOKENS = [*LORA, "--learning_rate", "0.3", "--trainable_token_indices", "<|im_start|>,<|im_end|>"]
QLORA = [*LORA, "--load_in_4bit"]
quick, slow, matrix = (), pytest.mark.slow, pytest.mark.matrix
RUNS = {
    "full-ddp": ("ddp", [], quick),
    "full-zero1": ("zero1", [], slow),
    "full-zero2": ("zero2", [], slow),
    "full-zero3": ("zero3", [], quick),
    "full-zero3_offload": ("zero3_offload", [], matrix),
    "full-sharded": ("sharded", [], slow),  # ZeRO-3 that never gathers: no *.safetensors anywhere
    "full-fsdp2": ("fsdp2", [], slow),
    "lora-ddp": ("ddp", LORA, slow),
    "lora-zero2": ("zero2", LORA, matrix),
    "lora-zero3": ("zero3", LORA, quick),
    "lora-sharded": ("sharded", LORA, slow),
    "lora-fsdp2": ("fsdp2", LORA, slow),
    "whole-zero3": ("zero3", WHOLE, matrix),
    "whole-fsdp2": ("fsdp2", WHOLE, slow),
    "tokens-zero3": ("zero3", TOKENS, slow),
    "tokens-fsdp2": ("fsdp2", TOKENS, slow),
    "dora-fsdp2": ("fsdp2", [*LORA, "--use_dora"], slow),
    "qlora-ddp": ("ddp", QLORA, matrix),
    "qlora-zero3": ("zero3", QLORA, matrix),
    "qlora-fsdp2": ("fsdp2", QLORA, quick),
    "full-fsdp2+deepseek_v3": ("fsdp2", [], slow),  # buffers in the state dict
    "full-fsdp2+gemma3": ("fsdp2", [], matrix),  # a vision tower that no text reaches
    "full-zero3+gemma3": ("zero3", [], slow),
    "lora-fsdp2+gemma3": ("fsdp2", [*LORA, "--learning_rate", "0.5"], matrix),
}
ON_EXPERTS = ["--use_peft", *as_flags(learning_rate=1, lora_target_modules="q_proj", lora_target_parameters="experts")]
RUNS |= {  # adapters on fused experts
    "experts-ddp+qwen3_moe": ("ddp", ON_EXPERTS, matrix),
    "experts-zero2+mixtral": ("zero2", ON_EXPERTS, matrix),
    "experts-zero3+gpt_oss": ("zero3", ON_EXPERTS, slow),
    "experts-fsdp2+mixtral": ("fsdp2", ON_EXPERTS, slow),
    "experts-divided+qwen3_moe": ("divided", ON_EXPERTS, matrix),
    "experts-divided+gpt_oss": ("divided", ON_EXPERTS, matrix),
    "qlora-experts-ddp+qwen3_moe": ("ddp", [*ON_EXPERTS, "--load_in_4bit"], slow),
    "full-divided+mixtral": ("divided", ["--learning_rate", "0.1"], slow),
}
FOUR = {"full-hsdp": ("hsdp", [], slow), "lora-hsdp": ("hsdp", LORA, matrix), "qlora-hsdp": ("hsdp", QLORA, matrix)}
