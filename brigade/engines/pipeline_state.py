"""A pipeline's state: put together from its stages, or saved by each of them. Every tensor has its name in the whole model."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .pipeline import Pipeline

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # as accelerate names FSDP2's: whoever reads those reads these


def gathered(pipeline: Pipeline, state: Mapping[str, Tensor], names: Iterable[str], wanted: bool) -> dict[str, Any]:
    """These tensors of the model's state on the ranks of a pipeline that want them, on the CPU; elsewhere {}. A collective.

    state: of this rank's stages. One tensor after another is sent, by the first rank that has it. Where no rank of a
    pipeline wants them, nothing is.
    """
    group, ranks = pipeline.groups.stages, pipeline.groups.ranks
    asked = torch.tensor(int(wanted), device=pipeline.device)
    dist.all_reduce(asked, group=group)
    said: list[Any] = [None] * len(ranks)
    dist.all_gather_object(said, {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}, group=group)
    found: dict[str, Any] = {}
    for name in names if asked else ():
        owner = next(number for number, has in enumerate(said) if name in has)
        shape, dtype = said[owner][name]
        mine = owner == pipeline.rank
        tensor = state[name].detach().contiguous() if mine else torch.empty(shape, dtype=dtype, device=pipeline.device)
        dist.broadcast(tensor, ranks[owner], group=group)
        if wanted:
            found[name] = tensor.cpu()
    return found


def save_model(folder: Path, state: Mapping[str, Tensor]) -> None:
    """As torch's distributed checkpoint; each rank gives what it has, and of equal names one is written. A collective."""
    _save(folder / MODEL, {"model": dict(state)})


def save_optimizer(folder: Path, states: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Likewise. states: of whole parameters; groups: the optimizer's own"""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    _save(folder / OPTIMIZER, {"optimizer": {"state": dict(states), "param_groups": kept}})


def _save(folder: Path, state: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as checkpoints

    checkpoints.save(state, storage_writer=checkpoints.FileSystemWriter(folder, sync_files=False))
