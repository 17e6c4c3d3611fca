"""Faults planted in a run on fake GPUs, of kinds that no run on a CPU can show: run_ranks("testing.gpu_faults", FAULT, FLAGS)."""

import json
import os
import sys
from typing import Any


def tensor_left_on_the_cpu() -> None:
    """A decoder layer's output is added to a tensor that nobody moved to the device."""
    import torch

    from brigade.train.model import load

    whole = load.load_model

    def damage(_: Any, __: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden + torch.zeros(hidden.shape[-1])

    def damaged(*arguments: Any, **named: Any) -> Any:
        model = whole(*arguments, **named)
        model.get_decoder().layers[0].register_forward_hook(damage)
        return model

    load.load_model = damaged


def cpu_tensor_given_to_nccl() -> None:
    """Before the first step ranks sum a CPU tensor in a group that has only NCCL."""
    import torch
    import torch.distributed as dist

    from brigade.train.step.trainer import Trainer

    begin = Trainer.get_batch_samples

    def summed(self: Any, *arguments: Any) -> Any:
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="nccl"))
        return begin(self, *arguments)

    Trainer.get_batch_samples = summed  # type: ignore[method-assign]


def device_of_another_rank() -> None:
    """Both ranks believe that they are the first of their host, and take its first GPU."""
    os.environ["LOCAL_RANK"] = "0"


def out_of_memory() -> None:
    """Both ranks lack memory in the forward pass of the first step. The evaluation before it has enough."""
    _lack_memory(training=True)


def out_of_memory_in_evaluation() -> None:
    """Both ranks lack memory in the evaluation before the first step."""
    _lack_memory(training=False)


def _lack_memory(training: bool) -> None:
    import torch

    from brigade.train.step.trainer import Trainer

    whole = Trainer.outputs

    def lack(self: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        if self.model.training == training:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {LACKS}. GPU 0 has too little.")
        return whole(self, model, *arguments, **named)

    Trainer.outputs = lack  # type: ignore[method-assign]


LACKS = "3.50 GiB"
FAULTS = {
    "a tensor left on the CPU": (tensor_left_on_the_cpu, "Expected all tensors to be on the same device"),
    "a CPU tensor given to NCCL": (cpu_tensor_given_to_nccl, "No backend type associated with device type cpu"),
    "the device of another rank": (device_of_another_rank, "2 of 2 ranks are here, with LOCAL_RANK 0, 0"),
    "too little memory": (out_of_memory, f"out of memory while allocating {LACKS[:-5]} GiB"),
    "too little memory in evaluation": (
        out_of_memory_in_evaluation,
        f"out of memory while allocating {LACKS[:-5]} GiB",
    ),
}

if __name__ == "__main__":
    import train
    from brigade.train.distributed.ranks import run_to_the_end

    FAULTS[sys.argv[1]][0]()
    run_to_the_end(lambda: train.main(json.loads(sys.argv[2])))
