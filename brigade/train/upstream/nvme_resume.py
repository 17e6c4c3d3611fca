"""Resuming optimizer states that ZeRO-3 swapped to NVMe, which DeepSpeed 0.19.8 saves whole and loads in part."""

from pathlib import Path
from typing import Any

import torch

from . import unpickling


def restore(engine: Any, checkpoint: str) -> None:
    """Complete what engine.load_checkpoint(checkpoint) restored of an optimizer whose states lie on NVMe.

    DeepSpeed copies the swap files back and reads nothing else of its optimizer checkpoint (engine.py:4456): a fresh
    engine does not know that the files with Adam's moments are there, starts them from zero at step 1 and overwrites
    them; parameter groups too small to be swapped keep neither moments nor master weights; and the first step has the
    learning rate of a run's beginning. Seen: the first loss after a resume is right, the second is not.
    """
    optimizer = engine.optimizer
    tag = (Path(checkpoint) / "latest").read_text().strip()
    file = engine._get_zero_ckpt_name(checkpoint, tag)
    saved = unpickling.load(Path(file), map_location="cpu")["optimizer_state_dict"]
    states, masters = saved["optimizer_state_dict"]["state"], saved["fp32_flat_groups"]

    # The checkpoint numbers the master partitions as the optimizer's parameter groups list them.
    optimizer._set_fp32_optimizer_param_groups()
    numbered = [master for group in optimizer.optimizer.param_groups for master in group["params"]]
    optimizer._clear_fp32_optimizer_param_groups()
    for group, kept in zip(
        optimizer.optimizer.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True
    ):
        group.update({key: value for key, value in kept.items() if key != "params"})
    optimizer.checkpoint_event_prologue()
    for number, master in enumerate(numbered):
        if number not in states:
            continue
        place = next(i for i, part in enumerate(optimizer.fp32_partitioned_groups_flat) if part is master)
        if optimizer._swappable_optimizer_subgroup(place):
            numel = int(optimizer.fp16_partitioned_groups_flat_numel[place])
            optimizer.optimizer.state[master] = {
                key: torch.empty(numel, dtype=value.dtype) if torch.is_tensor(value) and not value.numel() else value
                for key, value in states[number].items()
            }
            # Registers the moments' swap files by name; their content is read from there, so the memory can go.
            optimizer.optimizer_swapper._get_param_swap_info(master).release_memory()
        else:
            master.data.copy_(masters[place])
            optimizer.optimizer.state[master] = states[number]
            optimizer._reassign_or_swap_out_partitioned_parameters(place)  # the weights, from their master copy
    optimizer.checkpoint_event_epilogue()  # small parameters that stay whole on every rank
