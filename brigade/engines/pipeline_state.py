"""A pipeline's state, put together from its stages: every tensor has the name that it has in the whole model."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .pipeline import Pipeline


def gathered(pipeline: Pipeline, names: Iterable[str], wanted: bool) -> dict[str, Any]:
    """These tensors of the model's state on the ranks of a pipeline that want them, on the CPU; elsewhere {}. A collective.

    One tensor after another is sent, by the first rank that has it. Where no rank of a pipeline wants them, nothing is.
    """
    group, ranks = pipeline.groups.stages, pipeline.groups.ranks
    asked = torch.tensor(int(wanted), device=pipeline.device)
    dist.all_reduce(asked, group=group)
    own = pipeline.model.state_dict()
    said: list[Any] = [None] * len(ranks)
    dist.all_gather_object(said, {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}, group=group)
    found: dict[str, Any] = {}
    for name in names if asked else ():
        owner = next(number for number, has in enumerate(said) if name in has)
        shape, dtype = said[owner][name]
        here = owner == pipeline.rank
        tensor = own[name].detach() if here else torch.empty(shape, dtype=dtype, device=pipeline.device)
        dist.broadcast(tensor.contiguous() if here else tensor, ranks[owner], group=group)
        if wanted:
            found[name] = tensor.cpu()
    return found
