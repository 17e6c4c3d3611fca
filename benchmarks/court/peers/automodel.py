"""NeMo Automodel, by what `automodel FILE` runs in each process, with its ChatDataset. It has loops of its own.

On a CPU it ends at its first line, torch.cuda.reset_peak_memory_stats(), which a torch without CUDA does not have. Here that does
nothing. It then ends where it loads a model, at torch.cuda.current_device(). Nothing behind that has run here: adapters, packing
and AdamW are not in its configuration.
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


def answer(job: record.Job) -> None:
    from nemo_automodel.components.config.loader import load_yaml_config

    if not torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats = lambda *_: None
        torch.cuda.max_memory_allocated = lambda *_: 0
    module, name, loads = RECIPES[job["kind"]]
    given = {
        "recipe": name,
        "loads": f"nemo_automodel.{loads}.from_pretrained",
        "global_batch": job["micro"] * job["accumulation"] * job["ranks"],
        "sharded": "ddp" if job["strategy"] in ("", "ddp") else "fsdp2",
    }
    recipe: Any = getattr(importlib.import_module(f"nemo_automodel.recipes.{module}"), name)
    recipe(load_yaml_config(common.write_config(job, common.filled("automodel", job | given)))).setup()
    raise RuntimeError("it has loaded a model, and its steps are recorded nowhere yet")
