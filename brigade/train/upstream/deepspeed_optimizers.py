"""DeepSpeed's optimizers: where Transformers takes them for torch's, and what a resume has to complete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import unpickling

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


# ---- the learning rate ----------------------------------------------------------------------------------------------
def name_first_rate(learning_rate: float) -> None:
    """Give DeepSpeed's optimizers, which have no `defaults`, the learning rate that polynomial and cosine_with_min_lr read there
    (transformers/optimization.py; deepspeed/runtime/base_optimizer.py: DeepSpeedOptimizer)."""
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    DeepSpeedOptimizer.defaults = {"lr": learning_rate}


# ---- steps of Adam on the CPU ---------------------------------------------------------------------------------------
def repeat_steps(optimizer: torch.optim.Optimizer) -> None:
    """Bring what its C++ keeps of beta^step to where the optimizer's own count of steps is.

    It multiplies once more at each step that follows the last one, and takes a power where steps are left out
    (ops/csrc/includes/cpu_adam.h: IncrementStep). The two differ in their last bit: a resumed run would not be exact.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    group = optimizer.param_groups[0]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, 1 + max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)):
        figures = group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *figures, *nothing)


# ---- states on NVMe -------------------------------------------------------------------------------------------------
def restore(engine: DeepSpeedEngine, checkpoint: str) -> None:
    """Complete what engine.load_checkpoint(checkpoint) restored of an optimizer whose states lie on NVMe.

    DeepSpeed copies the swap files back and reads nothing else of its optimizer checkpoint (engine.py: load_checkpoint): a fresh
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
