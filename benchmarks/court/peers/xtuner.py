"""xtuner, by what `xtuner train FILE` calls: MMEngine's runner, with xtuner's own template qwen_chat.

On a CPU it ends in three places, which do nothing here: it asks torch.cpu for is_bf16_supported(), MMEngine gives each rank a
CUDA device, and torchvision, which it imports, finds no operators of its own. MMEngine counts micro-batches where others count
steps, and tells the first rank's loss of each; here their means are compared.
"""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
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
    """Write down what a job trains on, and what it says of each step, and save its model as `xtuner convert pth_to_hf` does."""

    loop: record.Loop

    def before_train(self, runner: Any) -> None:
        self.losses: list[float] = []
        self.model = getattr(runner.model, "module", runner.model)
        self.norm_of = getattr(runner.model, "get_global_grad_norm", None)  # DeepSpeed's
        if self.loop.job["lora"]:
            from peft import get_peft_model_state_dict

            named = get_peft_model_state_dict(self.model.llm, state_dict=record.whole(self.model.llm))
            self.loop.adapters = record.write_adapters(self.loop.job, named)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loop, (step, rest) = self.loop, divmod(batch_idx + 1, self.loop.job["accumulation"])
        loss = outputs["loss"].detach()
        dist.all_reduce(loss, "mean")
        self.losses.append(float(loss))
        loop.batches.append(
            record.samples_of({key: data_batch["data"][key] for key in ("input_ids", "attention_mask", "labels")})
        )
        if rest == 0:
            norm = self.norm_of() if self.norm_of else runner.message_hub.get_scalar("train/grad_norm").current()
            mean = sum(self.losses) / len(self.losses)
            self.losses.clear()
            loop.log.append({"step": step, "loss": mean, "grad_norm": float(norm)})
            loop.die_after(step)

    def after_train(self, runner: Any) -> None:
        with deepspeed.zero.GatheredParameters(self.model.parameters()):
            if record.RANK == 0:
                self.model.to_hf(runner.cfg, f"{self.loop.job['output']}/saved", fp32=True)


def pair_of(row: record.Job) -> record.Job:
    """Return answers as its DPO reads them: lists of messages, between which its tokenizer here writes nothing."""
    texts = {"prompt": row["prompt"]} | {key: f"{row[key]}<|im_end|>" for key in ("chosen", "rejected")}
    return {key: [{"role": "user", "content": text}] for key, text in texts.items()}


def config_of(job: record.Job) -> record.Job:
    given = {
        "batch": 1 if job["packing"] else job["micro"],
        "micro_batches": job["steps"] * job["accumulation"],
        "saves_at": job["dies_after"] or job["steps"],
        "stage": {"zero2": 2, "zero3": 3}.get(job["strategy"]),
        "pairs": f"{job['result']}.rows.jsonl",
        # Its release of Transformers reads this elsewhere than where the model's has it.
        "rope_theta": common.model_config(job)["rope_parameters"]["rope_theta"],
    }
    config = common.filled("xtuner", job | given)
    kind = config["kinds"][job["kind"]]
    config["model"] |= {"type": kind["model"], "lora": config["adapters"] if job["lora"] else None}
    config["train_dataloader"] |= kind["data"]
    config["optim_wrapper"]["optimizer"] = config["optimizers"][job["optim"]]
    return config | {"param_scheduler": config["rates"][job["schedule"]]}


def answer(job: record.Job) -> str:
    from xtuner.tools import train

    if job["kind"] in ("dpo", "orpo"):
        common.write_rows(job, [pair_of(row) for row in common.rows_of(job)])
    config = config_of(job)
    zero = Path(f"{job['result']}.zero.json")
    zero.write_text(json.dumps(config["deepspeed"]))
    launcher = "none" if job["ranks"] == 1 else "pytorch"
    sys.argv = ["train", common.write_config(job, config), "--launcher", launcher]
    if job["strategy"].startswith("zero"):
        sys.argv += ["--deepspeed", str(zero)]
    if job["died"]:
        sys.argv += ["--resume", f"{job['output']}/iter_{job['dies_after']}.pth"]
    with record.loop(job) as Watch.loop:
        train.main()
    return f"{job['output']}/saved"
