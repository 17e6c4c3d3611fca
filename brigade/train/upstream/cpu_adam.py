"""Bias correction of DeepSpeedCPUAdam after a resume."""

from typing import Any

import torch


def repeat_steps(optimizer: Any) -> None:
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
