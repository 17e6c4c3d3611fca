"""ZeRO-1 between the ranks that have the same stages: each steps a share of the parameters, and hands out the result.

Rajbhandari et al. 2020 (arXiv 1910.02054), P_os. Shares are equal in elements, as DeepSpeed's are: the trained parameters lie
end to end, and rank r has the r-th part of that line. A share of a parameter is a view of it, which a step changes in place.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...distributed import exchange
from ..shares import flat, local_part
from .pipeline import in_buckets, spread_
from .pipeline_state import DTYPES


class Slice(NamedTuple):
    """Elements start..stop of what this rank has of a parameter, flattened, which the rank `owner` of the group steps."""

    parameter: nn.Parameter
    start: int
    stop: int
    owner: int

    def cut(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor of the parameter's shape, as a view."""
        return flat(tensor)[self.start : self.stop]


def slices(parameters: list[nn.Parameter], ranks: int) -> Iterator[Slice]:
    """Yield slices that hold every element once, in order, in shares for so many ranks."""
    share, begin = -(-sum(local_part(parameter).numel() for parameter in parameters) // ranks), 0
    for parameter in parameters:
        start, size = 0, local_part(parameter).numel()
        while start < size:
            owner = (begin + start) // share
            stop = min(size, (owner + 1) * share - begin)
            yield Slice(parameter, start, stop, owner)
            start = stop
        begin += size


class Zero1:
    """An optimizer that steps only this rank's share.

    parameters: each list with the group of the ranks that have the same ones
    pieces: the share of each slice's parameter, which the optimizer has in the parameter's place
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[list[nn.Parameter], Any]]) -> None:
        self.optimizer = optimizer
        self.lines = [(list(slices(each, dist.get_world_size(group))), group) for each, group in parameters if each]
        own = (each for line, group in self.lines for each in line if each.owner == dist.get_rank(group))
        self.pieces = {each: nn.Parameter(each.cut(each.parameter)) for each in own}
        of_parameter = {each.parameter: piece for each, piece in self.pieces.items()}
        for settings in optimizer.param_groups:
            settings["params"] = [of_parameter[each] for each in settings["params"] if each in of_parameter]
        optimizer.register_step_pre_hook(self._take_gradients)
        optimizer.register_step_post_hook(self._hand_out)

    def _take_gradients(self, *_: object) -> None:
        for each, piece in self.pieces.items():
            gradient = each.parameter.grad
            piece.grad = None if gradient is None else each.cut(gradient)  # None: the step is left out

    def _hand_out(self, *_: object) -> None:
        for piece in self.pieces.values():
            piece.grad = None
        self.hand_out()

    @torch.no_grad()
    def hand_out(self) -> None:
        """Send each share of the weights to all ranks of its group. A collective."""
        for line, group in self.lines:
            for owner in range(dist.get_world_size(group)):
                theirs = [each.cut(each.parameter) for each in line if each.owner == owner]
                for dtype in dict.fromkeys(tensor.dtype for tensor in theirs):
                    for bucket in in_buckets(tensor for tensor in theirs if tensor.dtype == dtype):
                        together = torch.cat(bucket)
                        dist.broadcast(together, group_src=owner, group=group)
                        spread_(together, bucket)

    def states(self, parameters: Mapping[nn.Parameter, str]) -> dict[str, dict[str, object]]:
        """Return what the optimizer keeps for whole parameters, by these names; each rank has every n-th of them. A
        collective."""
        states: dict[str, dict[str, object]] = {}
        for number, (parameter, name) in enumerate(parameters.items()):
            group = next(group for line, group in self.lines for each in line if each.parameter is parameter)
            shares = [each for line, _ in self.lines for each in line if each.parameter is parameter]
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            mine = next((self.optimizer.state.get(self.pieces[each]) for each in shares if each in self.pieces), None)
            kinds = exchange.gather_in_group(
                {key: _kind(value) for key, value in mine.items()} if mine else None, group
            )
            state = dict(next(filter(None, kinds), {}))
            for key, (dtype, value) in state.items():
                if value is not None or not dtype:
                    state[key] = torch.tensor(value, dtype=DTYPES[dtype]) if dtype else value
                else:
                    here = local_part(parameter)
                    whole = torch.empty(here.numel(), dtype=DTYPES[dtype], device=here.device)
                    for each in shares:
                        if mine and each in self.pieces:
                            each.cut(whole).copy_(mine[key])
                        dist.broadcast(each.cut(whole), group_src=each.owner, group=group)
                    state[key] = _as_divided(whole.view(here.shape), parameter) if number % ranks == rank else None
            if number % ranks == rank and state:
                states[name] = state
        return states


def _as_divided(state: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """Return the state of this rank's part of a parameter as a part of the whole one's state, on the CPU where nothing is
    divided."""
    if not isinstance(parameter, DTensor):
        return state.cpu()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(state, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def _kind(value: Any) -> tuple[str, float | None]:
    """Return (dtype, "" for what is no tensor; value, None for a share, which is sent as a tensor)."""
    if not torch.is_tensor(value):
        return "", value
    return str(value.dtype), None if value.dim() else value.item()  # a count of steps is no share
