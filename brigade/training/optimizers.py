"""Norms that no sharding changes, clipping by them, and the optimizers that need them: LAMB (arXiv 1904.00962) and LARS
(arXiv 1708.03888) from pytorch-optimizer, under DDP and FSDP2 alike."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import yaml
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import TorchFunctionMode

from ..errors import UserError, did_you_mean

NAMES = ("lamb", "lars")
_FIGURES = ("weight_norm", "adam_norm", "trust_ratio")


def global_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of plain tensors and DTensors taken as one vector; float64 scalar, the same on every rank.

    Sums are taken in float64: on a CPU torch adds up fp32 squares one after another, which is off by 1e-5 and more for
    the gradient of an embedding, so that the norm would change with the number of shards. One collective per layout.
    """
    squares: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        local, layout = (
            (tensor.to_local(), (tensor.device_mesh, tensor.placements))
            if isinstance(tensor, DTensor)
            else (tensor, None)
        )
        # On a GPU a reduction is a tree, exact enough in fp32, and float64 would copy the tensor.
        precision = torch.float64 if local.device.type == "cpu" else torch.float32
        square = torch.linalg.vector_norm(local, dtype=precision).double() ** 2
        squares[layout] = squares[layout] + square if layout in squares else square
    total = torch.zeros((), dtype=torch.float64)
    for layout, square in squares.items():
        if layout is not None:
            mesh, placements = layout
            parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
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
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(scale.to(local.device, local.dtype))
    return norm


class _WholeNorms(TorchFunctionMode):
    """Under FSDP2 a parameter is a DTensor and its norm a partial one, which the library's in-place operations refuse
    (torch 2.13: "in-place operations that require placement changes"). Here a norm is at once that of all shards."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.linalg.norm:
            return global_norm(args[:1]).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def _base(name: str) -> Any:
    import pytorch_optimizer

    return {"lamb": pytorch_optimizer.Lamb, "lars": pytorch_optimizer.LARS}[name]


def parse_arguments(name: str, optim_args: str | None, place: str) -> dict[str, Any]:
    """`key=value,key=value` as a dictionary. Raises UserError at `place` for what the optimizer does not take: of torch's and
    bitsandbytes', Transformers leaves out what it does not know without a word (trainer_optimizer.py)."""
    known: Iterable[str] = ("momentum", "dampening", "weight_decay", "nesterov") if name == "sgd" else ()
    if name in NAMES:
        known = inspect.signature(_base(name).__init__).parameters.keys() - {"self", "params", "kwargs"}
    arguments = {}
    for key, text in (pair.split("=") for pair in (optim_args or "").split(",") if pair):
        if key not in known:
            cure = did_you_mean(key, known) if known else "leave optim_args out; it has keys of the recipe for its own"
            raise UserError(place, f"{name} has no argument {key!r}", cure)
        value = yaml.safe_load(text)
        try:
            arguments[key] = value if isinstance(value, bool | int) else float(value)  # 1e-5 is a text to YAML
        except (TypeError, ValueError):
            raise UserError(place, f"{key} is {text!r}", "give a number, true or false") from None
    return arguments


def whole_parameter_optimizer(name: str, args: Any, optim_args: str | None) -> tuple[Any, dict[str, Any]] | None:
    """Class and arguments for Trainer's optimizer_cls_and_kwargs, or None for an optimizer that Trainer builds itself.

    args: TrainingArguments; optim_args: "key=value,key=value" of the library's own, e.g. "trust_coefficient=0.02".
    """
    if name not in NAMES:
        return None
    base = _base(name)

    class WholeParameter(base):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            with _WholeNorms():
                loss = super().step(closure)
            for state in self.state.values():
                for figure in _FIGURES:  # kept for whoever looks; FSDP2 saves them as tensors and cannot load them
                    state.pop(figure, None)
            return loss

    WholeParameter.__name__ = WholeParameter.__qualname__ = base.__name__
    options = parse_arguments(name, optim_args, "optim_args")
    # foreach: its batched path mixes DTensors and plain tensors.
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "foreach": False} | options
    if name == "lamb":
        options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon} | options
    return WholeParameter, options
