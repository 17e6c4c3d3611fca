"""xtuner, by what `xtuner train FILE` calls: MMEngine's runner, with xtuner's own template qwen_chat.

On a CPU it ends in three places, which do nothing here: it asks torch.cpu for is_bf16_supported(), MMEngine gives each rank a
CUDA device, and torchvision, which it imports, finds no operators of its own. MMEngine counts micro-batches where others count
steps, and tells the first rank's loss of each; here their means are compared.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import yaml
from mmengine import dist
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from benchmarks.court.peers import common, record

torch.cuda.set_device = lambda *_: None
deepspeed.comm.torch.build_shm_op = lambda: None  # as in common.py
torch.cpu.is_bf16_supported = lambda: False
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")


@HOOKS.register_module()
class Watch(Hook):
    """Write down what `job` trains on, and what it says of each step, and save its model as `xtuner convert pth_to_hf` does."""

    job: record.Job

    def before_train(self, runner: Any) -> None:
        self.seen: record.Job = {"steps": [], "log": []}
        self.micro: list[tuple[Any, float]] = []
        self.job["records"].append(self.seen)
        self.model = getattr(runner.model, "module", runner.model)
        self.norm_of = getattr(runner.model, "get_global_grad_norm", None)  # DeepSpeed's
        if self.job["lora"]:
            from peft import get_peft_model_state_dict

            named = get_peft_model_state_dict(self.model.llm, state_dict=record.whole(self.model.llm))
            self.seen["adapters"] = record.write_adapters(self.job, named)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        step, rest = divmod(batch_idx + 1, self.job["accumulation"])
        batch = {key: data_batch["data"][key] for key in ("input_ids", "attention_mask", "labels")}
        loss = outputs["loss"].detach()
        dist.all_reduce(loss, "mean")
        self.micro.append((record.samples_of(batch), float(loss)))
        if rest == 0:
            batches, losses = zip(*self.micro, strict=True)
            self.micro.clear()
            norm = self.norm_of() if self.norm_of else runner.message_hub.get_scalar("train/grad_norm").current()
            self.seen["steps"].append(batches)
            self.seen["log"].append({"step": step, "loss": sum(losses) / len(losses), "grad_norm": float(norm)})
            if step == self.job["dies_after"] and not self.job["died"]:
                record.dead(self.job).write_text(json.dumps(self.job["records"]))
                os.kill(os.getpid(), signal.SIGKILL)

    def after_train(self, runner: Any) -> None:
        with deepspeed.zero.GatheredParameters(self.model.parameters()):
            if record.RANK == 0:
                self.model.to_hf(runner.cfg, f"{self.job['output']}/saved", fp32=True)


def pair_of(row: record.Job) -> record.Job:
    """Return answers as its DPO reads them: lists of messages, between which its tokenizer here writes nothing."""
    texts = {"prompt": row["prompt"]} | {key: f"{row[key]}<|im_end|>" for key in ("chosen", "rejected")}
    return {key: [{"role": "user", "content": text}] for key, text in texts.items()}


def config_of(job: record.Job) -> record.Job:
    model = json.loads((Path(job["model_path"]) / "config.json").read_text())
    given = {
        "batch": 1 if job["packing"] else job["micro"],
        "micro_batches": job["steps"] * job["accumulation"],
        "saves_at": job["dies_after"] or job["steps"],
        "stage": {"zero2": 2, "zero3": 3}.get(job["strategy"]),
        "pairs": f"{job['result']}.rows.jsonl",
        # Its release of Transformers reads this elsewhere than where the model's has it.
        "rope_theta": model["rope_parameters"]["rope_theta"],
    }
    config = common.filled("xtuner", job | given)
    kind = config["kinds"][job["kind"]]
    config["model"] |= {"type": kind["model"], "lora": config["adapters"] if job["lora"] else None}
    config["train_dataloader"] |= kind["data"]
    config["optim_wrapper"]["optimizer"] = config["optimizers"][job["optim"]]
    return config | {"param_scheduler": config["rates"][job["schedule"]]}


def answer(job: record.Job) -> str:
    from xtuner.tools import train

    if job["kind"] in ("kto", "image"):
        raise record.Refused("of preferences it has DPO and ORPO, of models that read images LLaVA and InternVL")
    if job["strategy"] == "fsdp2":
        raise record.Refused("it has DDP and DeepSpeed")
    if job["kind"] in ("dpo", "orpo"):
        common.write_rows(job, [pair_of(row) for row in common.rows_of(job)])
    Watch.job = job
    config = config_of(job)
    file, zero = Path(f"{job['result']}.yaml"), Path(f"{job['result']}.zero.json")
    file.write_text(yaml.safe_dump(config))
    zero.write_text(json.dumps(config["deepspeed"]))
    sys.argv = ["train", str(file), "--launcher", "none" if job["ranks"] == 1 else "pytorch"]
    if job["strategy"].startswith("zero"):
        sys.argv += ["--deepspeed", str(zero)]
    if job["died"]:
        sys.argv += ["--resume", f"{job['output']}/iter_{job['dies_after']}.pth"]
    train.main()
    return f"{job['output']}/saved"


if __name__ == "__main__":
    record.run(answer)
