"""Methods of adapters, and the strategies under which each is compared with one process and rehearsed: docs/methods.md."""

from . import parity

LORA = ["--use_peft", "--learning_rate", "2"]
TOKENS = [*LORA, "--learning_rate", "0.3", "--trainable_token_indices", "<|im_start|>,<|im_end|>,300"]
METHODS = {
    "lora": LORA,
    "parts": [*LORA, "--lora_target_modules", "q_proj,v_proj", "--use_rslora", "--lora_modules_to_save",
              "embed_tokens,lm_head", "--model_name_or_path", "UNTIED", "--learning_rate", "0.1"],
    "tokens": TOKENS,
    "tokens+untied": [*TOKENS, "--model_name_or_path", "UNTIED"],
    "tokens+qlora": [*TOKENS, "--load_in_4bit"],
    "patterns": [*LORA, "--lora_target_modules", r"layers\.0\..*,[qk]_proj", "--rank_pattern", "{q_proj: 4, 'mlp.*': 24}",
                 "--alpha_pattern", "{down_proj: 8}", "--loraplus_lr_ratio", "4", "--learning_rate", "0.5"],
    "dora": [*LORA, "--use_dora"],
    "qlora": [*LORA, "--load_in_4bit"],
    "qdora": [*LORA, "--load_in_4bit", "--use_dora"],
    "lora+lamb": [*LORA, "--optim", "lamb", "--learning_rate", "0.005"],
    "lora+lars": [*LORA, "--optim", "lars", "--learning_rate", "7"],
}  # fmt: skip
STRATEGIES = [name for name in parity.STRATEGIES if name != "hsdp"]  # HSDP takes four ranks: test_export.py


# LoRA and 4-bit weights under all of them; other forms of an adapter where weights are sharded, DoRA also where they are whole.
UNDER: dict[str, tuple[str, ...]] = {
    name: ("ddp" if name in ("lora+lamb", "lora+lars") else "zero3", "fsdp2") for name in METHODS
}
UNDER |= {
    "lora": tuple(STRATEGIES),
    "qlora": tuple(STRATEGIES),
    "tokens": ("ddp", "zero2", "zero3", "zero3_offload_param", "fsdp2"),
    "tokens+untied": ("ddp", "zero2", "zero3", "fsdp2"),
    "dora": ("ddp", "zero2", "zero3", "fsdp2"),
    "qdora": ("ddp", "zero2", "fsdp2"),
}
# Further ones are recipes, in test_rehearsal.py.
REHEARSED = {"lora": ("zero2", "fsdp2"), "qlora": ("zero3", "fsdp2"), "tokens": ("zero3", "fsdp2")}
