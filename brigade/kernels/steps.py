"""Prove optimizers: three steps are compared with AdamW's formula in fp64 on the same gradients (arXiv 1711.05101)."""

from collections.abc import Callable

import torch

from ..errors.tables import Fields
from .compare import FAR

RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
STEPS = 3
SIZES = ((257, 64), (4096,), (64, 128))  # bitsandbytes keeps 8 bits from 4,096 elements on
LARGEST = 2**26  # elements to time a step with: memory holds the states of five optimizers at once


def optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a recipe's `optim` names, as Transformers makes it (trainer_optimizer.py)."""
    options: Fields = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
    if "8bit" in name:
        import bitsandbytes

        return bitsandbytes.optim.AdamW(parameters, **options, optim_bits=8, is_paged=name.startswith("paged"))
    forms: dict[str, Fields] = {"adamw_torch_fused": {"fused": True}, "adamw_torch_foreach": {"foreach": True}}
    return torch.optim.AdamW(parameters, **options, **forms.get(name, {"foreach": False, "fused": False}))


def error(
    change: Callable[[str, list[torch.nn.Parameter]], torch.optim.Optimizer], name: str, device: torch.device | str
) -> float:
    """The mean error of the change that STEPS steps make, as a share of the mean change. change: optimizer() or one like it"""
    draw = torch.Generator().manual_seed(7)
    start = [torch.randn(*size, generator=draw) for size in SIZES]
    gradients = [[torch.randn(*size, generator=draw) * 10.0**-step for size in SIZES] for step in range(STEPS)]
    parameters = [torch.nn.Parameter(value.clone().to(device)) for value in start]
    stepper = change(name, parameters)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.to(device)
        stepper.step()
    off = whole = 0.0
    for number, (before, after) in enumerate(zip(start, parameters, strict=True)):
        wanted = by_formula(before.double(), [each[number].double() for each in gradients])
        off += float((after.detach().cpu().double() - wanted).abs().sum())
        whole += float((wanted - before).abs().sum())
    return off / whole if off < FAR else FAR


def by_formula(value: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """AdamW, algorithm 2 of arXiv 1711.05101."""
    mean, square = value * 0, value * 0
    for step, gradient in enumerate(gradients, 1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        first, second = mean / (1 - BETAS[0] ** step), square / (1 - BETAS[1] ** step)
        value = value * (1 - RATE * DECAY) - RATE * first / (second.sqrt() + EPSILON)
    return value


def timed(name: str, sizes: list[tuple[int, ...]], device: torch.device | str) -> Callable[[], None]:
    """A call to time: one step on parameters of these sizes, with at most LARGEST elements."""
    parameters, room = [], LARGEST
    for size in sizes:
        count = torch.Size(size).numel()
        if count <= room:
            room -= count
            parameters.append(torch.nn.Parameter(torch.randn(size, device=device)))
            parameters[-1].grad = torch.randn(size, device=device)
    return optimizer(name, parameters).step
