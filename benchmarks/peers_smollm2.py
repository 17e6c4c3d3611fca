"""What `python -m benchmarks.peers --smollm2` trains: a real model by LoRA, by train.py and by TRL, from the same beginning.

Everything comes from recipes/smollm2-135m/lora.yaml: TRL reads the same chats, in the order that train.py shuffles them to, and
renders them by the same chat template, whose generation marks say what its assistant_only_loss learns. Both seed torch before
PEFT makes the adapters, so these begin with the same numbers.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.pages import REPOSITORY
from testing.command_line import as_flags

RECIPE = REPOSITORY / "recipes/smollm2-135m/lora.yaml"

# Runs by name: flags of ours, and keys of a job of benchmarks/peers_trl.py. Of adapters the base is in half precision, and they
# are in fp32: train.py does so, and PEFT by default.
OURS: dict[str, dict[str, str]] = {"smollm2": {"bf16": "false"}, "smollm2_bf16": {"bf16": "true"}}
TRL: dict[str, dict[str, Any]] = {
    "trl_smollm2": {"bf16": False, "dtype": "float32"},
    "trl_smollm2_bf16": {"bf16": True, "dtype": "bfloat16"},
}
# Flags over the recipe: each step's loss, and nothing beside the steps that would take long.
FLAGS = {"logging_steps": "1", "max_eval_samples": "2", "save_steps": "null", "report_page": "false", "report_to": "[]"}
SAME = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim", "seed")


def settings_of(training: Any, model: Any, data: Any) -> dict[str, Any]:
    """A job of benchmarks/peers_trl.py that computes what a recipe's sections say, with TRL's names."""
    micro = int(training.per_device_train_batch_size)
    return {
        "max_length": data.max_length,
        "micro_batch": micro,
        "accumulation": training.global_batch_size // micro,
        "lora": {
            "r": model.lora_r,
            "lora_alpha": model.lora_alpha,
            "lora_dropout": model.lora_dropout,
            "target_modules": model.lora_target_modules,
        },
        **{key: getattr(training, key) for key in SAME},
        # Keys of TrainingArguments beside those that all peers share.
        "arguments": {
            "lr_scheduler_type": training.lr_scheduler_type,
            "warmup_steps": training.warmup_steps,
            "train_sampling_strategy": "sequential",
            **{key: getattr(training, key) for key in SAME if key.startswith(("adam", "weight"))},
        },
    }


def build(folder: Path) -> dict[str, Any]:
    """Write the chats in the order of the first epoch under `folder`; returns what peers_data.build() returns, and also
    {"chat_template"}, a file for TRL, and {"recipe", "flags", "settings"}: of our run, and of TRL's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from brigade.train.data.layout import TEMPLATES
    from brigade.train.data.sampling import GlobalBatches
    from brigade.train.model.location import location
    from brigade.train.recipe import flags

    settings = flags.load(as_flags(recipe=str(RECIPE), **FLAGS))
    recipe, model = settings.recipe, location(settings)
    job = settings_of(recipe.training, recipe.model, recipe.data)
    rows = (REPOSITORY / str(recipe.data.train_file)).read_text().splitlines(keepends=True)
    batches = GlobalBatches(len(rows), job["micro_batch"], job["accumulation"], 0, 1, recipe.training.seed)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(rows[place] for place in batches.order().flatten())
    (folder / "smollm2.jsonl").write_text(text)
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    return {
        "train": str(folder / "smollm2.jsonl"),
        "model": model,
        "tokenizer": model,
        "chat_template": str(TEMPLATES / f"{recipe.data.chat_template}.jinja"),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "dialogues": len(rows),
        "parameters": parameters,
        "shape": json.loads(RECIPE.with_name("config.json").read_text()),
        "recipe": str(RECIPE),
        "flags": FLAGS,
        "settings": job,
    }
