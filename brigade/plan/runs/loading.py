"""Whether the hosts and GPUs of a run can hold its model while it loads, by what the planner counts."""

import sys
from typing import TYPE_CHECKING

from ...errors import first_line
from ...train.host import control_groups
from ...train.run.directory import Run
from ..choice.job_of_run import NotCovered
from ..costs.host_memory import copied, whole_on_gpu
from ..costs.memory import GIB
from .prediction import planned_job

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOUR_BITS = "leave load_in_4bit out: LoRA's base is read by shards; or take GPUs with more memory"
HOST = "take hosts with more memory, or raise their limit; FSDP2 reads one weight after the other"


def fails_to_load(run: Run, config: "PreTrainedConfig") -> tuple[str, str] | None:
    """Return why this host or this rank's GPU cannot hold a run's model while it loads, and a cure; None where it can, and where
    there is no GPU. Only weights that are there on any run are counted: neither a process nor CUDA's context.

    Print what may be too much for a host, and why nothing is counted where the planner cannot.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        job = planned_job(run, config, 0, "")
        on_gpu, least, most = whole_on_gpu(job), copied(job, certain=True), copied(job)
    except Exception as error:  # a run that trains does not end for an estimate's sake
        kind = "" if isinstance(error, NotCovered) else f"the formulas fail on it, {type(error).__name__}: "
        if run.world.is_main_rank:
            print(f"memory while the model loads was not checked: {kind}{first_line(error)}", flush=True)
        return None
    on_device, on_host = torch.cuda.mem_get_info()[1], control_groups.memory()
    if on_gpu > on_device:
        kind = "DeepSpeed" if job.deepspeed else "FSDP2"
        problem = f"each GPU holds the whole model in 4 bits before {kind} cuts its shards, "
        return f"{problem}{_compared(on_gpu, on_device)}", FOUR_BITS
    if least > on_host:
        return f"its processes own copies of weights while the model loads, {_compared(least, on_host)}", HOST
    if most > on_host and run.world.local_rank == 0:
        told = f"its processes may own copies of weights while the model loads, up to {_compared(most, on_host)}"
        print(f"warning: host {run.world.host}: {told}\n  cure: {HOST}", file=sys.stderr, flush=True)
    return None


def _compared(needed: float, there: float) -> str:
    return f"{needed / GIB:.1f} GiB by the planner's count, and it has {there / GIB:.1f}"
