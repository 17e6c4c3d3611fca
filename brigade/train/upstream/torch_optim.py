"""What torch's own optimizers and clipping compute, for those that gather matrices themselves or step many tensors at once."""

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

# ---- Muon -----------------------------------------------------------------------------------------------------------
# What torch's Muon computes of one matrix (torch/optim/_muon.py), for who has gathered that matrix by itself.
ADJUSTMENTS = ("match_rms_adamw", "original")  # torch's names of adjust_lr_fn


def orthogonalised(update: torch.Tensor, steps: int) -> torch.Tensor:
    """Return an update with all its singular values near 1, in bfloat16. update: 2-D; in bfloat16 it is overwritten"""
    coefficients = (3.4445, -4.7750, 2.0315)  # torch's defaults, and Keller Jordan's
    return _zeropower_via_newtonschulz(update, coefficients, steps, 1e-7)


def adjusted_rate(learning_rate: float, adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Return the learning rate of a matrix of this shape. adjust_lr_fn: "original" or "match_rms_adamw", as torch names them"""
    return _adjust_lr(learning_rate, adjust_lr_fn, torch.Size([rows, columns]))


# ---- many tensors at once -------------------------------------------------------------------------------------------
# Functions over many tensors at once, which torch's own clipping and optimizers call (torch/nn/utils/clip_grad.py,
# torch/optim/adam.py): a single call of Python, and on a GPU few kernels.
def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Euclidean norm of each tensor, summed in fp32."""
    return list(torch._foreach_norm(tensors, 2, torch.float32))


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

    trained, zs, squares: y, z and v (step/schedule_free.py); steps: so many, with this one; share: c
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
