"""Functions over many tensors at once, which torch's own clipping and optimizers call (torch/nn/utils/clip_grad.py,
torch/optim/adam.py): a single call of Python, and on a GPU few kernels."""

import torch


def norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the Euclidean norm of each tensor, summed in this precision."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a scalar, in place."""
    torch._foreach_mul_(tensors, factor)


def step_schedule_free(
    trained: list[torch.Tensor],
    zs: list[torch.Tensor],
    squares: list[torch.Tensor],
    gradients: list[torch.Tensor],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rate: float,
    steps: int,
    share: float,
) -> None:
    """Make a step of schedule-free AdamW in place, as torch's AdamW makes its own (torch/optim/adam.py: _multi_tensor_adam).
    Tensors are of the same device and type; gradients are overwritten.

    trained, zs, squares: y, z and v (loop/schedule_free.py); steps: so many, with this one; share: c
    """
    beta1, beta2 = betas
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, (1 - beta2**steps) ** 0.5)
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(gradients, roots)
    if weight_decay:
        torch._foreach_add_(gradients, trained, alpha=weight_decay)
    # y of z' and x', by y alone
    torch._foreach_lerp_(trained, zs, share)
    torch._foreach_add_(trained, gradients, alpha=rate * (beta1 * (1 - share) - 1))
    torch._foreach_add_(zs, gradients, alpha=-rate)
