"""NeMo Automodel, by what `automodel FILE` runs in each process, with its ChatDataset. It has loops of its own.

On a CPU it ends at its first line, torch.cuda.reset_peak_memory_stats(), which a torch without CUDA does not have. Here that does
nothing. It then ends where it loads a model, at torch.cuda.current_device(). Nothing behind that has run here: adapters, packing
and AdamW are not in its configuration.
"""

import importlib
from typing import Any

import torch

from benchmarks.court.peers import common, record


def answer(job: record.Job) -> None:
    from nemo_automodel.components.config.loader import load_yaml_config

    if not torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats = lambda *_: None
        torch.cuda.max_memory_allocated = lambda *_: 0
    given = {
        "global_batch": job["micro"] * job["accumulation"] * job["ranks"],
        "sharded": "ddp" if job["strategy"] in ("", "ddp") else "fsdp2",
    }
    config = common.filled("automodel", job | given)
    run, recipe = config["run"], config["recipes"][job["kind"]]
    run["recipe"], run["model"]["_target_"] = recipe["name"], recipe["loads"]
    of: Any = getattr(importlib.import_module(recipe["module"]), recipe["name"])
    of(load_yaml_config(common.write_config(job, run))).setup()
    raise RuntimeError("it has loaded a model, and its steps are recorded nowhere yet")
