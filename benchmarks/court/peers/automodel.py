"""NeMo Automodel, by what `automodel FILE` runs in each process, with its ChatDataset. It has loops of its own.

On a CPU it ends at its first line, torch.cuda.reset_peak_memory_stats(), which a torch without CUDA does not have. Here that does
nothing. It then ends where it loads a model, at torch.cuda.current_device().
"""

import importlib
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.court.peers import common, record

LANGUAGE = ("llm.train_ft", "TrainFinetuneRecipeForNextTokenPrediction", "NeMoAutoModelForCausalLM")
RECIPES = {
    "chat": LANGUAGE,
    "text": LANGUAGE,  # which reads such rows by another data set; it ends before it reads any
    "image": ("vlm.finetune", "FinetuneRecipeForVLM", "NeMoAutoModelForImageTextToText"),
}


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


def answer(job: record.Job) -> str:
    from nemo_automodel.components.config.loader import load_yaml_config

    if job["kind"] not in RECIPES:
        raise record.Refused("it has no recipe of preferences")
    if job["strategy"].startswith("zero"):
        raise record.Refused("it has DDP, FSDP2 and Megatron's FSDP, and no ZeRO")
    if not torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats = lambda *_: None
        torch.cuda.max_memory_allocated = lambda *_: 0
    module, name, _ = RECIPES[job["kind"]]
    recipe: Any = getattr(importlib.import_module(f"nemo_automodel.recipes.{module}"), name)
    file = Path(f"{job['result']}.yaml")
    file.write_text(yaml.safe_dump(config_of(job)))
    steps, log = [], []
    begin = recipe._run_train_optim_step

    def step(self: Any, batches: list[Any], *given: Any) -> Any:
        steps.append([record.samples_of(_unshifted(batch)) for batch in batches])
        found = begin(self, batches, *given)
        log.append({"step": len(steps), **{key: float(found.metrics[key]) for key in ("loss", "grad_norm")}})
        return found

    recipe._run_train_optim_step = step
    try:
        trainer = recipe(load_yaml_config(file))
        trainer.setup()
        trainer.run_train_validation_loop()
    finally:
        recipe._run_train_optim_step = begin
        job["records"].append({"steps": steps, "log": log})
    (saved,) = sorted(Path(job["output"]).rglob("consolidated"))[-1:]
    return str(saved)


def _unshifted(batch: Any) -> dict[str, torch.Tensor]:
    """Return a batch whose labels stand where their tokens are, as Transformers has them: here they stand one place before."""
    ids, labels = batch["input_ids"], batch["labels"]
    last = labels[:, -1:].clamp(min=0)
    whole = torch.cat([torch.full_like(labels[:, :1], -100), labels], 1)
    mask = torch.ones_like(whole) if "attention_mask" not in batch else batch["attention_mask"]
    mask = torch.nn.functional.pad(mask, (0, whole.shape[1] - mask.shape[1]), value=1)
    return {"input_ids": torch.cat([ids, last], 1), "labels": whole, "attention_mask": mask}


if __name__ == "__main__":
    record.run(answer)
