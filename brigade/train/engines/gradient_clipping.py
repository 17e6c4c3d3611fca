"""Norms that no sharding changes, and clipping by them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..upstream import torch_optim
from .shares import local_part

CHUNK = 2**17  # elements that are in float64 at a time: 1 MiB, which stays in a core's cache


@torch.no_grad()  # to_local() then hands out what is there
def global_norm(tensors: Iterable[torch.Tensor], device: torch.device | str | None = None) -> torch.Tensor:
    """Euclidean norm of plain tensors and DTensors taken as one vector; float64 scalar, the same on every rank.

    Sums are taken in float64: on a CPU torch adds up fp32 squares one after another, which is off by 1e-5 and more for
    the gradient of an embedding, so that the norm would change with the number of shards. One collective per layout. It stays
    on the tensors' device, and the host does not wait for it. device: where the norm lies if there are no tensors
    """
    layouts = defaultdict[Any, list[torch.Tensor]](list)
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            layouts[local.device, (tensor.device_mesh, tensor.placements)].append(local)
        else:
            layouts[tensor.device, None].append(tensor)
    total = torch.zeros((), dtype=torch.float64, device=next(iter(layouts), (device,))[0])
    for (_, layout), parts in layouts.items():
        square = _square(parts)
        if layout is not None:
            mesh, placements = layout
            # Not is_shard(): a matrix that is also divided over a tensor group is a _StridedShard.
            sums = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            square = DTensor.from_local(square, mesh, sums).full_tensor()
        total = total.to(square.device) + square
    return total.sqrt()


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of tensors of one device, as a float64 scalar.

    On a CPU by chunks that are converted into the same memory again and again: torch's norm in float64 copies each tensor into
    new pages, which costs several times what the sum does. On a GPU a reduction is a tree, exact enough in fp32.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch_optim.norms(tensors)).double().square().sum()
    converted = torch.empty(CHUNK, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.reshape(-1).split(CHUNK):
            here = converted[: len(chunk)].copy_(chunk)
            total += torch.dot(here, here)
    return total


def clip_(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm` (0: leave them); return the norm before.

    It does what torch.nn.utils.clip_grad_norm_ does, with the norm of global_norm.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients)
    if max_norm > 0:
        scale_(gradients, norm, max_norm)
    return norm


@torch.no_grad()
def scale_(gradients: Iterable[torch.Tensor | None], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of this norm in place so that it is at most `max_norm`."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    alike = defaultdict[Any, list[torch.Tensor]](list)
    for gradient in gradients:
        if gradient is not None:
            local = local_part(gradient)
            alike[local.device, local.dtype].append(local)
    for (device, dtype), parts in alike.items():
        torch_optim.scale_(parts, scale.to(device, dtype))
