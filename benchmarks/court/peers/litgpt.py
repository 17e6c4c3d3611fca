"""LitGPT, by `litgpt finetune_full` and `litgpt finetune_lora`, with models of its own.

Its rows are an instruction and an output. Of a chat the last answer is the output, and the instruction is what stands before it,
as the template writes it. It has one schedule, a cosine after a warmup: where a question has a constant rate, one stands in its
place. It logs no norm of gradients, which is taken from them here.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.fabric import Fabric
from litgpt.__main__ import main
from litgpt.config import name_to_config
from litgpt.data import JSON
from litgpt.finetune import full, lora
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
from safetensors.torch import save_file
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.court.peers import common, record

NAMES = {"smollm2": "SmolLM2-135M-Instruct"}


def rows_of(job: record.Job) -> str:
    """Write a job's rows in LitGPT's form, and return their folder."""
    folder = Path(f"{job['result']}.rows")
    folder.mkdir(exist_ok=True)
    for name, file in (("train", job["file"]), ("val", job["held_out"])):
        rows = [_row(json.loads(line)) for line in Path(file).read_text().splitlines()]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return str(folder)


def _row(row: record.Job) -> dict[str, str]:
    if "text" in row:
        return {"instruction": "", "output": row["text"]}
    *before, last = row["messages"]
    asked = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in before)
    return {"instruction": f"{asked}<|im_start|>assistant\n", "output": last["content"]}


def checkpoint_of(job: record.Job, config: record.Job) -> Path:
    """Convert a job's model, as `litgpt convert_to_litgpt` does; a tiny one first gets `config` among those that LitGPT knows."""
    folder = Path(f"{job['result']}.{record.RANK}.model") / str(NAMES.get(job["model"], job["model"]))
    shutil.copytree(job["model_path"], folder, dirs_exist_ok=True)
    name_to_config.setdefault(folder.name, config | {"name": folder.name})
    convert_hf_checkpoint(folder)
    return folder


def by_peft_names(named: dict[str, torch.Tensor], layers: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """Return adapters by PEFT's names. It has those of queries, keys and values in one, here of equal sizes. layers: PEFT's names
    of each"""
    found = {}
    for name, tensor in named.items():
        if ".lora_" in name:
            layer, *module, which = name.split(".")[2:]
            names = layers[".".join(module)]
            for to, part in zip(names, tensor.chunk(len(names)), strict=True):
                found[f"base_model.model.model.layers.{layer}.{to}.{which}.weight"] = part.detach().clone()
    return found


def answer(job: record.Job) -> str:
    recipe: Any = lora if job["lora"] else full
    given = {
        "rows_folder": rows_of(job),
        "saves_at": job["dies_after"] or 1000,
        "global_batch": job["micro"] * job["accumulation"] * job["ranks"],
    }
    settings = common.filled("litgpt", job | given | common.model_config(job))
    run = settings["run"] | {"optimizer": settings["optimizers"][job["optim"]]}
    run |= settings["lora"] if job["lora"] else {"resume": job["died"]}
    checkpoint = checkpoint_of(job, settings["model"])
    command = ["finetune_lora" if job["lora"] else "finetune_full", str(checkpoint)]
    sys.argv[1:] = [*command, "--config", common.write_config(job, run)]
    load, fit = JSON.train_dataloader, recipe.fit
    with record.loop(job) as loop, contextlib.ExitStack() as patches:

        def said(_: Any, metrics: Any, step: Any = None) -> None:
            if "iter" in metrics and metrics["iter"] % job["accumulation"] == 0:
                loss = torch.tensor(metrics["loss"] / job["ranks"])  # of each rank it logs its own
                if job["ranks"] > 1:
                    torch.distributed.all_reduce(loss)
                loop.log.append({"step": metrics["step"], "loss": float(loss), "grad_norm": loop.norm})

        def fitted(**named: Any) -> Any:
            if job["lora"]:
                loop.adapters = record.write_adapters(
                    job, by_peft_names(record.whole(named["model"].module), settings["peft"])
                )
            return fit(**named)

        def loaded(data: Any) -> Any:
            return loop.watch(load(data), lambda batch: record.padded(batch["input_ids"], batch["labels"], 0))

        patches.enter_context(mock.patch.object(JSON, "train_dataloader", loaded))
        patches.enter_context(mock.patch.object(Fabric, "log_dict", said))
        patches.enter_context(mock.patch.object(recipe, "fit", fitted))
        if job["schedule"] == "constant":
            constant = mock.patch.object(recipe, "get_lr_scheduler", lambda optimizer, **_: ConstantLR(optimizer, 1.0))
            patches.enter_context(constant)
        patches.callback(register_optimizer_step_pre_hook(loop.measure).remove)
        main()
    saved = Path(job["output"]) / "saved"
    if record.RANK == 0:
        convert_lit_checkpoint(Path(job["output"]) / "final", saved)
        shutil.copy(checkpoint / "config.json", saved)
        save_file(torch.load(saved / "model.pth"), saved / "model.safetensors", {"format": "pt"})
        if job["lora"]:
            adapters = torch.load(Path(job["output"]) / "final/lit_model.pth.lora")["model"]
            save_file(by_peft_names(adapters, settings["peft"]), saved / "adapter_model.safetensors")
    return str(saved)
