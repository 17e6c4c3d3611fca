"""Runs whose loss or gradient is not finite in one sample: the cases' strategies, what poisons them, and the worker of a group.

The poisoned sample is one line of the data. Whoever computes on it gets NaN, once in each epoch.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import CONFIG_MAPPING, TrainerCallback

import train
from brigade.train.distributed import ranks
from brigade.train.model.tiny import shrink
from brigade.train.step import bad_steps
from brigade.train.step.pipeline_trainer import PipelineTrainer
from brigade.train.step.trainer import Trainer

from . import parity, runs
from .ranks import run_ranks

STEPS, STEP, BATCH, MICRO = 8, 4, 16, 4
SOUND = 4  # steps before an overflow
SEED, SAMPLES = 42, 67
ORDER = np.random.default_rng((SEED, 0)).permutation(SAMPLES)[: 4 * BATCH].reshape(4, BATCH // MICRO, MICRO)
POISONED = int(ORDER[STEP - 1, -1, 1])  # in the last micro-batch of the last rank
MIXTURE, BIASED = "mixture", "biased"
FREE = ["--optim", "schedule_free_adamw", "--lr_scheduler_type", "constant"]
STRATEGIES = parity.STRATEGIES | {
    "ddp+lora": [*parity.DDP, "--use_peft", "true"],
    "zero3+lora": [*parity.STRATEGIES["zero3"], "--use_peft", "true"],
    "fsdp2+lora": [*parity.STRATEGIES["fsdp2"], "--use_peft", "true"],
    "ddp+bf16": [*parity.DDP, "--bf16"],
    "zero1+bf16": [*parity.STRATEGIES["zero1"], "--bf16"],
    "zero3+bf16": [*parity.STRATEGIES["zero3"], "--bf16"],
    "fsdp2+bf16": [*parity.STRATEGIES["fsdp2"], "--bf16"],
    "ddp+power_sgd": [*parity.DDP, "--ddp_comm_hook", "power_sgd"],
    "pipeline": ["--ds_config", "ds_configs/zero1_pp2.json"],
    "ddp+sgd": [*parity.DDP, "--optim", "sgd"],
    # Experts over both ranks: tokens of one rank's NaN lie on the other rank, too. The model lies in inputs()'s folder.
    "fsdp2+experts": ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml", "--model_name_or_path", MIXTURE],
    **{
        f"{kind}+biases": [*parity.STRATEGIES[kind], "--router_bias_update_rate", "0.1", "--model_name_or_path", BIASED]
        for kind in ("ddp", "zero2", "zero3", "fsdp2")
    },
    "fsdp2+lamb": [*parity.STRATEGIES["fsdp2"], "--optim", "lamb"],
    **{f"{kind}+free": [*parity.STRATEGIES[kind], *FREE] for kind in ("ddp", "zero2", "zero3", "fsdp2")},
    "single": [],
}


class Watch(TrainerCallback):
    """A digest of this rank's weights and optimizer states after each step, from 0, the learning rates, and fp16's scales."""

    def __init__(self):
        self.held, self.rates, self.scales = [], [], []

    def look(self, model, optimizer):
        digest = hashlib.sha256()
        for tensor in states(model, optimizer):
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.held.append(digest.hexdigest())

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if not self.held:
            self.look(model, optimizer)

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        self.look(model, optimizer)
        self.rates += lr_scheduler.get_last_lr()[:1]
        if args.fp16:
            scaler = getattr(optimizer, "scaler", None)
            self.scales.append(float(scaler.get_scale() if scaler else optimizer.optimizer.loss_scale))


def states(model, optimizer):
    yield from (getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters())
    yield from (buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias"))  # of routers
    while not isinstance(optimizer, torch.optim.Optimizer):  # accelerate's and DeepSpeed's stand before it
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            yield from getattr(optimizer, name, [])
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        yield from (torch.as_tensor(value) for value in state.values() if value is not None)


class Litter(TrainerCallback):
    """NaN after each step in what ZeRO-3 appends to the last rank's parts: memory that nobody wrote may hold it."""

    def on_step_end(self, args, state, control, model=None, **_):
        littered = 0
        for parameter in model.parameters():
            part = parameter.ds_tensor
            own = min(max(parameter.ds_numel - int(os.environ["RANK"]) * part.numel(), 0), part.numel())
            part.data[own:] = math.nan
            littered += part.numel() - own
        assert sum(ranks.gather(littered)), "these shapes have no padding"


class Drop(TrainerCallback):
    """The reference: the optimizer has no gradients in these steps, and nothing is NaN."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if state.global_step + 1 in poisoned_steps():
            model.zero_grad()


def poisoned_steps(steps=STEPS):
    """From 1: in which steps the poisoned sample is."""
    each = -(-SAMPLES // BATCH)
    place = [np.random.default_rng((SEED, epoch)).permutation(SAMPLES).tolist().index(POISONED) for epoch in range(3)]
    return [epoch * each + at // BATCH + 1 for epoch, at in enumerate(place) if epoch * each + at // BATCH < steps]


def poison(kind):
    """Trainer.compute_loss where the poisoned sample's loss is NaN, or its `gradient` alone, or the loss is a `spike`; or where
    rank 1 alone has a loss far beyond fp16 after SOUND steps: an `overflow`."""
    sound = Trainer.compute_loss

    def compute_loss(self, model, inputs, *args, **options):
        loss = sound(self, model, inputs, *args, **options)
        if kind in ("nothing", "padding") or not model.training:
            return loss
        if kind == "overflow":
            beyond = self.args.fp16 and os.environ["RANK"] == "1" and self.state.global_step >= SOUND
            return loss * 1e9 if beyond else loss
        if not holds(inputs["input_ids"], self.train_dataset[POISONED]):
            return loss
        if kind == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
            return loss
        return loss * (50 if kind == "spike" else math.nan)

    def compute_part(self, part, inputs, *rest):
        output = sound_part(self, part, inputs, *rest)
        if not part.last or not self.model.training or not holds(inputs["input_ids"], self.train_dataset[POISONED]):
            return output
        if kind == "gradient":
            output.register_hook(lambda gradient: gradient * math.nan)
        return output * {"loss": math.nan, "spike": 50}.get(kind, 1)

    sound_part = PipelineTrainer.compute_part
    Trainer.compute_loss, PipelineTrainer.compute_part = compute_loss, compute_part

    def sober():
        Trainer.compute_loss, PipelineTrainer.compute_part = sound, sound_part

    return sober


def holds(ids, sample):
    wanted = torch.from_numpy(sample["input_ids"])
    return ids.numel() >= len(wanted) and (ids.flatten().unfold(0, len(wanted), 1) == wanted).all(1).any()


def work(folder):
    bad_steps.FEWEST = 3
    rank = int(os.environ["RANK"])
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        watch, said, output = Watch(), io.StringIO(), folder / "outputs" / name
        callbacks = (watch, Drop()) if case["poison"] == "nothing" else (watch,)
        if case["poison"] == "padding":
            callbacks += (Litter(),)
        sober = poison(case["poison"])
        with contextlib.redirect_stdout(said):
            trainer = train.main([*case["flags"], "--output_dir", str(output)], callbacks=callbacks)
        sober()
        held = ranks.gather((watch.held, watch.scales))
        if rank == 0:
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            found = {key: {entry["step"]: entry[key] for entry in log} for key in ("loss", "grad_norm")}
            found |= {"held": [each for each, _ in held], "scales": [each for _, each in held], "rates": watch.rates}
            (folder / f"{name}.json").write_text(json.dumps(found | {"said": said.getvalue()}))
        runs.forget(trainer)
        del trainer


def inputs(folder):
    """The flags that all cases share."""
    mixture = json.loads((runs.REPOSITORY / "recipes/qwen3-30b-a3b/config.json").read_text())
    for name, config in ((MIXTURE, mixture), (BIASED, CONFIG_MAPPING["minimax_m2"]().to_dict())):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(shrink(config)))
    return [
        *runs.write_inputs(folder),
        *f"--optim adamw_torch_fused --learning_rate 3e-3 --max_steps {STEPS} --eval_steps null".split(),
        *f"--lr_scheduler_type linear --global_batch_size {BATCH} --max_grad_norm 1".split(),
        *f"--per_device_train_batch_size {MICRO} --save_steps 2 --save_total_limit 9".split(),
    ]


def run_group(folder, cases, size):
    """Run cases, each a strategy, what poisons its sample, and further flags, in one group of ranks."""
    shared, todo = inputs(folder), {}
    for name, (strategy, what, further) in cases.items():
        words = [str(folder / word) if word in (MIXTURE, BIASED) else word for word in STRATEGIES[strategy]]
        todo[name] = {"flags": [*shared, *words, *further], "poison": what}
    (folder / "cases.json").write_text(json.dumps(todo))
    done = run_ranks("testing.nonfinite", str(folder), ranks=size, timeout=900)
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    ranks.run_to_the_end(lambda: work(Path(sys.argv[1])))
