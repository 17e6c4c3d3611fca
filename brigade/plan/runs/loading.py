"""Whether the hosts and GPUs of a run can hold its model while it loads, by what the planner counts."""

from contextlib import suppress
from typing import Any

from ...train import control_groups
from ...train.run.directory import Run
from ..choice.job_of_run import NotCovered
from ..costs.host_memory import copied, whole_on_gpu
from ..costs.memory import GIB
from .prediction import planned_job

FOUR_BITS = "leave load_in_4bit out: LoRA's base is read by shards; or take GPUs with more memory"
HOST = "take hosts with more memory, or raise their limit; FSDP2 reads one weight after the other"


def fails_to_load(run: Run, config: Any) -> tuple[str, str] | None:
    """Return why this host or this rank's GPU cannot hold a run's model while it loads, and a cure; None where it can, where
    there is no GPU, or where no formula covers the run. Only weights are counted, which is certain: neither a process nor CUDA's
    context."""
    import torch

    if not torch.cuda.is_available():
        return None
    with suppress(NotCovered):
        job = planned_job(run, config, 0, "")
        needed, there = whole_on_gpu(job), torch.cuda.mem_get_info()[1]
        if needed > there:
            kind = "DeepSpeed" if job.deepspeed else "FSDP2"
            problem = f"each GPU holds the whole model in 4 bits before {kind} cuts its shards, "
            return f"{problem}{needed / GIB:.1f} GiB by the planner's count, and has {there / GIB:.1f}", FOUR_BITS
        needed, there = copied(job), control_groups.memory()
        if needed > there:
            problem = "its processes own copies of weights while the model loads, "
            return f"{problem}{needed / GIB:.1f} GiB by the planner's count, and the host has {there / GIB:.1f}", HOST
    return None
