"""Runs in which one rank goes astray after a step, and the worker of their groups."""

import os
from pathlib import Path

import torch
from transformers import TrainerCallback

import train
from brigade.train.distributed import ranks
from brigade.train.run import on_disk

from . import parity, runs
from .on_ranks import on_ranks

STEPS, SAVED = 4, 2
STRATEGIES = parity.STRATEGIES | {
    "ddp+lora": [*parity.DDP, "--use_peft", "true"],
    "tensor": ["--accelerate_config", "accelerate_configs/fsdp2_tp2_1x4.yaml"],
    "autotp": ["--ds_config", "ds_configs/zero2_tp2.json"],
    "pipeline": ["--ds_config", "ds_configs/zero1_pp2.json"],
}


class Astray(TrainerCallback):
    """Changes a thing on one rank, after a step."""

    def __init__(self, what, rank, step):
        self.what, self.rank, self.step = what, rank, step

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        if int(os.environ["RANK"]) != self.rank or state.global_step != self.step:
            return
        local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        states = list(optimizer.state.values())
        if self.what == "weights":
            for each in local:
                each.data.mul_(1.5)
        elif self.what == "bit":
            local[-1].view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        elif self.what == "norms":
            for name, each in model.named_parameters():
                if "norm" in name:
                    (each.to_local() if hasattr(each, "to_local") else each).data.mul_(1.5)
        elif self.what == "moment":
            states[0]["exp_avg"].mul_(1.5)
        elif self.what == "count":
            states[0]["step"] += 1
        elif self.what == "rate":
            lr_scheduler._last_lr = [1.0 for _ in lr_scheduler.get_last_lr()]
        elif self.what == "epoch":
            state.epoch += 1


def work(folder, cases):
    """What each case raised, as {name: {"said", "whose", "hosts", "code", "checkpoints"}}."""
    caught, raised = [], {}

    def fail(error, *_):
        caught.append(error)
        raise error

    train.ranks.fail = fail
    for name, case in cases.items():
        output, found = Path(folder, "outputs", name), {}
        try:
            trainer = train.main([*case["flags"], "--output_dir", str(output)], callbacks=(Astray(*case["astray"]),))
            runs.forget(trainer)
        except Exception as error:
            if not caught:
                raise
            found = {"said": str(error), **{key: getattr(error, key, None) for key in ("whose", "hosts", "code")}}
        caught.clear()
        raised[name] = found | {"checkpoints": sorted(on_disk.whole_checkpoints(output))}
        ranks.barrier()
    return raised


def run_group(folder, cases, size):
    """name -> what work() found. cases: name -> (strategy, what, rank, step)"""
    shared = runs.write_inputs(folder)
    shared += (
        f"--optim adamw_torch --learning_rate 3e-3 --max_steps {STEPS} --eval_steps null --save_steps {SAVED}".split()
    )
    shared += ["--max_grad_norm", "1", "--per_device_train_batch_size", "2"]
    todo = {name: {"flags": [*shared, *STRATEGIES[of]], "astray": rest} for name, (of, *rest) in cases.items()}
    return on_ranks(work, str(folder), todo, ranks=size)[0]
