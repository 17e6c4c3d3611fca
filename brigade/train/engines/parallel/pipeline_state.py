"""A pipeline's state: put together from its stages, or saved by each of them. Tensors have their names in the whole model."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...checkpoint.states import States
from ...distributed import exchange
from .pipeline import Pipeline

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"  # Accelerate's names for FSDP2's, for whatever reads those
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}  # by "torch.bfloat16"


def gathered(pipeline: Pipeline, state: Mapping[str, Tensor], names: Iterable[str], wanted: bool) -> dict[str, Tensor]:
    """Return these tensors of the model's state, on the CPU, on the ranks of a pipeline that want them; elsewhere {}. A
    collective.

    One tensor after another is sent, by the first rank that has it; nothing is sent where no rank of a pipeline wants them.
    state: that of this rank's stages
    """
    group, ranks = pipeline.groups.stages, pipeline.groups.ranks
    asked = torch.tensor(int(wanted), device=pipeline.device)
    dist.all_reduce(asked, group=group)
    parts = (pipeline.groups.tensor, pipeline.groups.experts and pipeline.groups.experts.experts.get_group())
    for together in filter(None, parts):  # groups that put their parts together
        dist.all_reduce(asked, group=together)
    own = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()}
    by_rank = exchange.gather_in_group(own, group)
    tensors: dict[str, Any] = {}
    for name in names if asked else ():
        owner = next(number for number, has in enumerate(by_rank) if name in has)
        shape, dtype = by_rank[owner][name]
        mine = owner == pipeline.rank
        tensor = _whole(state[name]) if mine else torch.empty(shape, dtype=DTYPES[dtype], device=pipeline.device)
        dist.broadcast(tensor, ranks[owner], group=group)
        if wanted:
            tensors[name] = tensor.cpu()
    return tensors


def _whole(tensor: torch.Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def save_model(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Save the model as torch's distributed checkpoint: each rank gives what it has, and each name is written once. A
    collective."""
    _save(folder / MODEL, {"model": dict(state)})


def save_optimizer(folder: Path, states: Mapping[str, object], groups: Iterable[Mapping[str, object]]) -> None:
    """Save the optimizer in the same way. states: those of whole parameters; groups: the optimizer's own"""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    _save(folder / OPTIMIZER, {"optimizer": {"state": dict(states), "param_groups": kept}})


def _save(folder: Path, state: dict[str, object]) -> None:
    import torch.distributed.checkpoint as checkpoints

    checkpoints.save(state, storage_writer=checkpoints.FileSystemWriter(folder, sync_files=False))


class OwnPart:
    """checkpoint.states.States whose start and stop count within what this rank has of a parameter.

    parameters: by name, those that this rank has a part of; everything else is read as it is
    """

    def __init__(self, source: States, parameters: Mapping[str, DTensor]) -> None:
        self._source, self._parameters = source, parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        parameter = self._parameters.get(name)
        if parameter is None or start >= stop:
            return self._source.read(name, key, start, stop)
        part = parameter.__create_chunk_list__()[0]
        here, first = part.sizes, part.offsets
        row, own = parameter.shape[1:].numel(), torch.Size(here[1:]).numel()
        begin, end, column = start // own, -(-stop // own), first[1] if len(first) > 1 else 0
        rows = self._source.read(name, key, (first[0] + begin) * row, (first[0] + end) * row).view(-1, row)
        return rows[:, column : column + own].reshape(-1)[start - begin * own : stop - begin * own]
