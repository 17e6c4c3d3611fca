"""NeMo Automodel, by what `automodel FILE` runs in each process, with its ChatDataset. It has loops of its own.

On a CPU it ends at its first line, torch.cuda.reset_peak_memory_stats(), which a torch without CUDA does not have. Here that does
nothing. It then ends where it loads a model, at torch.cuda.current_device(), and nothing behind that has run here.
"""

import importlib
from typing import Any

import torch

from benchmarks.court.peers import common, record

LANGUAGE = ("llm.train_ft", "TrainFinetuneRecipeForNextTokenPrediction", "NeMoAutoModelForCausalLM")
RECIPES = {
    "chat": LANGUAGE,
    "text": LANGUAGE,  # which reads such rows by another data set; it ends before it reads any
    "image": ("vlm.finetune", "FinetuneRecipeForVLM", "NeMoAutoModelForImageTextToText"),
}

WITHOUT = dict.fromkeys(("dpo", "kto", "orpo"), "it has no recipe of preferences")
WITHOUT |= dict.fromkeys(("zero2", "zero3", "lora-zero3"), "it has DDP, FSDP2 and Megatron's FSDP, and no ZeRO")


def config_of(job: record.Job) -> record.Job:
    optimizers: dict[str, record.Job] = {
        "sgd": {"_target_": "torch.optim.SGD"},
        "adamw": {"_target_": "torch.optim.AdamW", "weight_decay": 0.0, "eps": 1e-4},
    }
    given = {
        "recipe": RECIPES[job["kind"]][1],
        "loads": f"nemo_automodel.{RECIPES[job['kind']][2]}.from_pretrained",
        "global_batch": job["micro"] * job["accumulation"] * job["ranks"],
        "saves_at": job["dies_after"] or job["steps"],
        "sharded": "ddp" if job["strategy"] in ("", "ddp") else "fsdp2",
        "optimizer": {**optimizers[job["optim"]], "lr": job["learning_rate"]},
    }
    config = common.filled("automodel", job | given)
    if job["lora"]:
        peft = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "match_all_linear": True}
        config["peft"] = peft | {"dim": 4, "alpha": 8, "dropout": 0.0}
    if job["packing"]:
        config["packed_sequence"] = {"packed_sequence_size": 256}
    return config


def answer(job: record.Job) -> None:
    from nemo_automodel.components.config.loader import load_yaml_config

    record.refuse(job, WITHOUT)
    if not torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats = lambda *_: None
        torch.cuda.max_memory_allocated = lambda *_: 0
    module, name, _ = RECIPES[job["kind"]]
    recipe: Any = getattr(importlib.import_module(f"nemo_automodel.recipes.{module}"), name)
    recipe(load_yaml_config(common.write_config(job, config_of(job)))).setup()
    raise RuntimeError("it has loaded a model, and its steps are recorded nowhere yet")


if __name__ == "__main__":
    record.run(answer)
