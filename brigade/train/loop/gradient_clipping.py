"""Norms that no sharding changes, and clipping by them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate


def global_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of plain tensors and DTensors taken as one vector; float64 scalar, the same on every rank.

    Sums are taken in float64: on a CPU torch adds up fp32 squares one after another, which is off by 1e-5 and more for
    the gradient of an embedding, so that the norm would change with the number of shards. One collective per layout.
    """
    squares: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        local, layout = tensor, None
        if isinstance(tensor, DTensor):
            local, layout = tensor.to_local(), (tensor.device_mesh, tensor.placements)
        # On a GPU a reduction is a tree, exact enough in fp32, and float64 would copy the tensor.
        precision = torch.float64 if local.device.type == "cpu" else torch.float32
        square = torch.linalg.vector_norm(local, dtype=precision).double() ** 2
        squares[layout] = squares[layout] + square if layout in squares else square
    total = torch.zeros((), dtype=torch.float64)
    for layout, square in squares.items():
        if layout is not None:
            mesh, placements = layout
            # Not is_shard(): a matrix that is also divided over a tensor group is a _StridedShard.
            parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            square = DTensor.from_local(square, mesh, parts).full_tensor()
        total = total.to(square.device) + square
    return total.sqrt()


def clip_(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm` (0: leave them); return the norm before.

    As torch.nn.utils.clip_grad_norm_, with the norm of global_norm.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients)
    if max_norm > 0:
        scale_(gradients, norm, max_norm)
    return norm


def scale_(gradients: Iterable[torch.Tensor | None], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of this norm in place so that it is at most `max_norm`."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(scale.to(local.device, local.dtype))
