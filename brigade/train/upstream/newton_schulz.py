"""What torch's Muon computes of one matrix (torch/optim/_muon.py), for who has gathered that matrix by itself."""

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

ADJUSTMENTS = ("match_rms_adamw", "original")  # torch's names of adjust_lr_fn


def orthogonalised(update: torch.Tensor, steps: int) -> torch.Tensor:
    """Return an update with all its singular values near 1, in bfloat16. update: 2-D; in bfloat16 it is overwritten"""
    coefficients = (3.4445, -4.7750, 2.0315)  # torch's defaults, and Keller Jordan's
    return _zeropower_via_newtonschulz(update, coefficients, steps, 1e-7)


def adjusted_rate(learning_rate: float, adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Return the learning rate of a matrix of this shape. adjust_lr_fn: "original" or "match_rms_adamw", as torch names them"""
    return _adjust_lr(learning_rate, adjust_lr_fn, torch.Size([rows, columns]))
