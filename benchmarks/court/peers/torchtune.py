"""torchtune, by its recipes as `tune run RECIPE --config FILE` runs them, with models of its own and the tokenizer of Qwen2.

The latter writes ChatML. It has recipes of one process and of FSDP2. It counts epochs and trains to the end of one, which is more
steps than are asked for where they are not whole epochs.

A recipe of FSDP2 asks a device for its memory as it begins, of which a CPU has none to say. Here that does nothing.
"""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchtune import training
from torchtune.models import convert_weights

from benchmarks.court.peers import common, record

MODELS = {"llama": "llama2", "tied": "llama3_2", "smollm2": "llama3_2", "mistral": "mistral"}


def tokenizer_of(job: record.Job) -> record.Job:
    """Write a tokenizer's words and merges as files, as torchtune reads them, and return its part of the configuration."""
    folder = Path(job["model_path"])
    read = json.loads((folder / "tokenizer.json").read_text())
    named = json.loads((folder / "tokenizer_config.json").read_text())
    words, merges = Path(f"{job['result']}.vocab.json"), Path(f"{job['result']}.merges.txt")
    words.write_text(json.dumps(read["model"]["vocab"]))
    merges.write_text("\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in read["model"]["merges"]))
    return {
        "_component_": "torchtune.models.qwen2.Qwen2Tokenizer",
        "path": str(words),
        "merges_file": str(merges),
        "special_tokens": {token["content"]: token["id"] for token in read["added_tokens"]},
        "eos_token": named["eos_token"],
        "pad_token": named["pad_token"],
        "max_seq_len": 512 if job["packing"] else None,  # by default it has none; a pack has one, here of all rows
    }


def config_of(job: record.Job) -> record.Job:
    rows = 1 if job["packing"] else len(common.rows_of(job))
    batch = min(job["micro"], rows)  # a batch that is not full is left out
    steps = rows // (batch * job["ranks"]) // job["accumulation"]
    name, model = MODELS[job["model"]], common.model_config(job)
    given = {
        "built": f"torchtune.models.{name}.{'lora_' if job['lora'] else ''}{name}",
        "rope_base": int(model["rope_parameters"]["rope_theta"]),
        "tokenizer": tokenizer_of(job),
        "model_type": name.upper(),
        "batch": batch,
        "epochs": math.ceil(job["steps"] / steps),
        "cycles": 0.5 if job["schedule"] == "cosine" else 0.0,  # of a cosine; none is a constant
    }
    config = common.filled("torchtune", job | model | given)
    config["dataset"] = config["datasets"][job["kind"]]
    config["model"] |= config["of_models"][name] | (config["lora"] if job["lora"] else {})
    return config


def answer(job: record.Job) -> str:
    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
    training.get_memory_stats = training.log_memory_stats = lambda *_, **__: {}
    method = "LoRA" if job["lora"] else "Full"
    name, devices = ("Distributed", "distributed") if job["ranks"] > 1 else ("SingleDevice", "single_device")
    file = Path(training.__file__).parents[2] / f"recipes/{method.lower()}_finetune_{devices}.py"
    recipe = runpy.run_path(str(file))[f"{method}FinetuneRecipe{name}"]
    given = config_of(job)
    config = OmegaConf.create(given)
    if job["lora"] and job["ranks"] > 1:
        torch.distributed.init_process_group("gloo")  # as its recipe_main does
    trainer = recipe(config)
    trainer.setup(config)
    with record.loop(job) as loop:
        if job["lora"]:
            loop.adapters = adapters_of(job, trainer)
        loop.watch(trainer._dataloader, lambda batch: as_batch(batch, trainer._tokenizer.pad_id))
        if record.RANK == 0:
            trainer._metric_logger.log_dict = lambda values, step: loop.log.append(
                {"step": step, **{key: float(values[key]) for key in ("loss", "grad_norm")}}
            )
        trainer.train()
    trainer.cleanup()
    return str(Path(job["output"]) / f"epoch_{given['epochs'] - 1}")


def as_batch(batch: record.Job, padding: int) -> record.Job:
    found = record.padded(batch["tokens"], batch["labels"], padding)
    if "input_pos" in batch:  # of packed samples: the mask counts them
        found["attention_mask"] = found["attention_mask"] * (batch["input_pos"] == 0).cumsum(1)
    return found


def adapters_of(job: record.Job, trainer: Any) -> str:
    """Write the adapters as they are before the first step, by PEFT's names, and return the file."""
    config = common.model_config(job)
    shape = {"num_heads": config["num_attention_heads"], "num_kv_heads": config["num_key_value_heads"]}
    named = convert_weights.tune_to_peft_adapter_weights(
        record.whole(trainer._model), dim=config["hidden_size"], head_dim=None, **shape
    )
    return record.write_adapters(job, named)
