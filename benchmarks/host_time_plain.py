"""The plain loop of benchmarks/host_time.py: what a step needs at least, under each strategy, as a reader would write it."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, TrainerCallback

REPOSITORY = Path(__file__).resolve().parent.parent
Batch = dict[str, torch.Tensor]


class Engine(NamedTuple):
    """What differs between strategies.

    micro_step: of a batch, the supervised tokens of its step, and whether it is the step's last; returns the loss
    end: of a step; returns the norm of its gradient
    """

    model: torch.nn.Module
    micro_step: Callable[[Batch, Any, bool], torch.Tensor]
    end: Callable[[], Any]
    schedule: torch.optim.lr_scheduler.LRScheduler


def engine_of(strategy: str, model: PreTrainedModel, ds_config: str | None, accumulation: int) -> Engine:
    """Wrap a model for one of host_time_worker.STRATEGIES. ds_config: the file of a ZeRO strategy"""
    return deepspeed_engine(model, ds_config, accumulation) if ds_config else torch_engine(strategy, model)


def train(
    engine: Engine, batches: Iterator[Batch], clock: TrainerCallback, steps: int, accumulation: int, logged: int
) -> None:
    """Train for so many steps, with a line of losses for every `logged` of them."""
    engine.model.train()
    clock.on_train_begin()
    summed = torch.zeros(())
    for number in range(1, steps + 1):
        step = [next(batches) for _ in range(accumulation)]
        supervised = _supervised(step)
        for batch in step:
            last = batch is step[-1]
            summed += engine.micro_step(batch, supervised, last).detach()
            if not last:
                clock.on_substep_end()
        norm = engine.end()
        clock.on_step_end()
        if number % logged == 0:
            print(number, summed.item() / logged, float(norm), engine.schedule.get_last_lr())
            summed.zero_()


def torch_engine(strategy: str, model: PreTrainedModel) -> Engine:
    """One process, DDP or FSDP2."""
    wrapped: Any = model
    if strategy == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif strategy == "FSDP2":
        for part in (*model.model.layers, model):
            torch.distributed.fsdp.fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def micro_step(batch: Batch, supervised: Any, last: bool) -> torch.Tensor:
        with wrapped.no_sync() if strategy == "DDP" and not last else nullcontext():
            loss = wrapped(**batch, use_cache=False, num_items_in_batch=supervised).loss
            loss.backward()
        return loss

    def end() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return norm

    return Engine(wrapped, micro_step, end, schedule)


def deepspeed_engine(model: PreTrainedModel, ds_config: str, accumulation: int) -> Engine:
    """ZeRO, with what Transformers puts where the file says "auto"."""
    import deepspeed

    config = json.loads((REPOSITORY / ds_config).read_text())
    config = {key: value for key, value in config.items() if value != "auto" and key not in ("bf16", "fp16")}
    hidden = model.config.hidden_size
    of_size = {"reduce_bucket_size": hidden**2, "stage3_prefetch_bucket_size": int(0.9 * hidden**2)}
    of_size |= {"stage3_param_persistence_threshold": 10 * hidden}
    zero = config["zero_optimization"]
    zero |= {key: of_size[key] for key, value in zero.items() if value == "auto"}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation}
    config |= {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
    engine, _, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        config=config,
        lr_scheduler=lambda wrapped: torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 1.0),
    )

    def micro_step(batch: Batch, supervised: Any, last: bool) -> torch.Tensor:
        loss = engine(**batch, use_cache=False, num_items_in_batch=supervised).loss
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()  # clips, steps and clears where it is the last
        return loss

    return Engine(engine, micro_step, lambda: engine.get_global_grad_norm() or 0, schedule)


def _supervised(step: list[Batch]) -> Any:
    """Return the supervised tokens of a step over all ranks, as a mean of theirs, for gradients are means too."""
    count = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in step]).sum()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(count)
    return count
