"""Which slices of parameters a rank's DeepSpeed engine holds, and what has to follow when these are set from outside.

The public safe_set_* functions set moments only after a first step, for DeepSpeed makes them then; and one parameter after
another would be swapped in and out. Hence the engine's own maps: stage_1_and_2.py: link_hp_params, stage3.py: grad_position.
DeepSpeed's way from one number of ranks to another, universal checkpoints, gives all sub-groups of ZeRO-3 one tensor
that counts steps, and all parameter groups the first one's weight decay (stage3.py:
load_hp_checkpoint_state_from_checkpoint_dir_stage3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.ops.adam import DeepSpeedCPUAdam

from . import deepspeed_optimizers

Share = tuple[torch.nn.Parameter, int, int, torch.Tensor, int]


def shares(optimizer: torch.optim.Optimizer) -> Iterator[Share]:
    """(parameter, start, stop, flat tensor, offset): its elements start..stop lie in a flat master tensor from `offset` on."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        for group in optimizer.fp16_groups:
            for parameter in group:
                number, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = size * optimizer._get_param_partition_rank(parameter)
                stop = min(start + size, parameter.ds_numel)
                yield parameter, min(start, stop), stop, optimizer.fp32_partitioned_groups_flat[number], offset
        return
    for flat, group in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        for parameter in group:
            held = parameter._hp_mapping
            if held is not None:
                here, there = held.lp_fragment_address, held.hp_fragment_address
                yield parameter, here.start, here.start + here.numel, flat, there.start


def own_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return what this rank has of a parameter under ZeRO-3, flat: without what is appended where the ranks do not divide it,
    memory that nobody wrote (partition_parameters.py: _partition_param). Empty where it lies on NVMe."""
    part = parameter.ds_tensor
    if part.dim() == 0:  # what stands for it meanwhile (swap_tensor/partitioned_param_swapper.py)
        return part[None][:0]
    start = part.ds_numel * dist.get_rank(group=parameter.ds_process_group)
    return part[: max(0, parameter.ds_numel - start)]


def load_moments(optimizer: torch.optim.Optimizer, moments_of: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Give the optimizer inside its moments. moments_of: id of a flat master tensor -> that one's moments and step"""
    inside, by_parts = optimizer.optimizer, hasattr(optimizer, "fp32_partitioned_groups_flat")
    if by_parts:
        optimizer._set_fp32_optimizer_param_groups()
    # DeepSpeedCPUAdam's C++ takes no tensor. Of each its own: an optimizer adds to it in place.
    form: Any = int if isinstance(inside, DeepSpeedCPUAdam) else torch.tensor
    masters = [master for group in inside.param_groups for master in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, master in enumerate(masters):
        kept = dict(moments_of.get(id(master), {}))
        if kept:
            if "step" in kept:
                kept["step"] = form(kept["step"])
            state[number] = kept
    inside.load_state_dict({"state": state, "param_groups": inside.state_dict()["param_groups"]})
    deepspeed_optimizers.repeat_steps(inside)
    if by_parts:
        optimizer._clear_fp32_optimizer_param_groups()
    else:
        optimizer._link_all_hp_params()


def spread_weights(engine: DeepSpeedEngine, steps: int) -> None:
    """Give the model its weights from the master copies, and the engine the number of steps. A collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.checkpoint_event_prologue()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()
    engine.global_steps, engine.global_samples = steps, steps * engine.train_batch_size()
    dist.barrier()
