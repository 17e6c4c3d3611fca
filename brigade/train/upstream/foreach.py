"""Functions over many tensors at once, which torch's own clipping calls (torch/nn/utils/clip_grad.py): a single call of Python,
and on a GPU few kernels."""

import torch


def norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the Euclidean norm of each tensor, summed in this precision."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a scalar, in place."""
    torch._foreach_mul_(tensors, factor)
