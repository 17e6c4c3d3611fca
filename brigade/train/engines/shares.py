"""What this rank holds of each parameter: which part of the whole, and where that lies in memory."""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# (parameter, start, stop, tensor that the optimizer steps, offset in it, of each row only these columns)
Share = tuple[torch.nn.Parameter, int, int, Tensor, int, slice | None]

Moments = Mapping[int, Mapping[str, Any]]  # id of the tensor that an optimizer steps -> its moments and its step


def name_of(name: str) -> str:
    """A parameter's name in the model and in checkpoints, without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "")


def shares_of(model: torch.nn.Module) -> Iterator[Share]:
    """Yield what this rank has of each trained parameter, which the optimizer steps itself."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        offset = 0
        for start, stop, columns in _ranges(parameter):
            yield parameter, start, stop, parameter, offset, columns
            offset += stop - start


def _ranges(parameter: Tensor) -> list[tuple[int, int, slice | None]]:
    """Return where this rank's part of a parameter lies in the flattened whole: a range of rows under FSDP2, only some columns
    of these where a tensor group has divided them, and a range of each of a rank's experts where experts are divided too."""
    if not isinstance(parameter, DTensor):
        return [(0, parameter.numel(), None)]
    if not parameter.to_local().numel():
        return [(0, 0, None)]
    chunk, shape = parameter.__create_chunk_list__()[0], parameter.shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if len(shape) == 2 and chunk.sizes[1] != shape[1]:
        start, columns = chunk.offsets[0] * shape[1], slice(chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1])
        return [(start, start + chunk.sizes[0] * shape[1], columns)]
    cut = max((dim for dim, size in enumerate(chunk.sizes) if size != shape[dim]), default=0)  # the last one divided
    first, length = sum(map(operator.mul, chunk.offsets, strides)), chunk.sizes[cut] * strides[cut]
    starts = [first + sum(map(operator.mul, at, strides)) for at in itertools.product(*map(range, chunk.sizes[:cut]))]
    return [(start, start + length, None) for start in starts]


def chunk_of(tensor: Tensor) -> tuple[object, ...]:
    """Return where this rank's part of a tensor lies in the whole: offsets and sizes, or () where it is the whole."""
    if not isinstance(tensor, DTensor) or not tensor.to_local().numel():
        return ()
    chunk = tensor.__create_chunk_list__()[0]
    return (*chunk.offsets, *chunk.sizes)


@dataclass(frozen=True)
class OwnPart:
    """A part of a weight that a tensor group has divided, where nothing says which one. chunk: of it, as chunk_of() says"""

    chunk: tuple[object, ...] = ()


def in_four_bits(model: torch.nn.Module) -> set[str]:
    """Return the names of the weights that bitsandbytes keeps in 4 bits. Shards that FSDP2 makes of them look like any tensor."""
    modules = model.named_modules()
    return {name_of(f"{path}.weight") for path, module in modules if getattr(module, "quant_state", None) is not None}


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory and without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(owner: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in one dimension and in the same memory."""
    return local_part(owner).view(-1)


def _like(owner: Tensor, flat: Tensor) -> Tensor:
    if not isinstance(owner, DTensor):
        return flat.view(owner.shape)
    local, shape, stride = flat.view(owner.to_local().shape), owner.shape, owner.stride()
    return DTensor.from_local(local, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def load_moments(optimizer: torch.optim.Optimizer, moments_of: Moments, by_group: bool) -> None:
    """Give an optimizer of torch's kind moments.

    moments_of: id of the tensor that it steps -> that one's moments and step; by_group: it counts steps in its groups
    """
    loaded: dict[int, dict[str, Any]] = {}
    owners = [owner for group in optimizer.param_groups for owner in group["params"]]
    for number, owner in enumerate(owners):
        kept = dict(moments_of[id(owner)])
        step = kept.pop("step", None)
        # In the order in which torch's optimizers make them; of each its own step: an optimizer adds to it in place.
        counted = {} if step is None or by_group else {"step": torch.tensor(step)}
        loaded[number] = counted | {key: _like(owner, flat) for key, flat in kept.items()}
    groups = optimizer.state_dict()["param_groups"]
    if by_group:
        groups = [{**group, "step": int(step)} for group in groups]
    optimizer.load_state_dict({"state": {n: state for n, state in loaded.items() if state}, "param_groups": groups})
