"""The optimizers that Transformers does not have: Muon (muon.py), schedule-free AdamW (schedule_free.py), and those that need the
norms of whole parameters, LAMB (arXiv 1904.00962) and LARS (arXiv 1708.03888) from pytorch-optimizer, under DDP and FSDP2 alike;
and the arguments of them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import UserError, did_you_mean
from ..engines.gradient_clipping import global_norm
from ..recipe.files import parse_yaml
from ..recipe.training_section import COUNT_IN_GROUPS
from ..upstream.torch_optim import ADJUSTMENTS

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..engines.engine import Keywords


ARGUMENTS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "muon": ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
}
# What recipes have a key for, by the optimizers' names. As an argument, weight_decay would do nothing, because Transformers'
# groups of parameters have it, and lr would replace learning_rate in those of LAMB and LARS (parameter_groups.py).
BY_KEY = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
}
NAMES = {"adjust_lr_fn": ADJUSTMENTS}  # arguments that are no numbers
_FIGURES = ("weight_norm", "adam_norm", "trust_ratio")


class _WholeNorms(TorchFunctionMode):
    """Under FSDP2 a parameter is a DTensor and its norm a partial one, which the library's in-place operations refuse
    (torch: "in-place operations that require placement changes"). Here a norm is at once that of all shards."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        if function is torch.linalg.norm:
            return global_norm(args[:1]).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def _base(name: str) -> type[torch.optim.Optimizer]:
    import pytorch_optimizer

    return {"lamb": pytorch_optimizer.Lamb, "lars": pytorch_optimizer.LARS}[name]


def parse_arguments(name: str, optim_args: str | None, place: str) -> Keywords:
    """Return `key=value,key=value` as a dictionary. Raises UserError at `place` for what the optimizer does not take, because
    Transformers silently drops what it does not know of torch's and bitsandbytes' arguments (trainer_optimizer.py)."""
    known: Iterable[str] = ARGUMENTS.get(name, ())
    if name in COUNT_IN_GROUPS:
        known = inspect.signature(_base(name).__init__).parameters.keys() - {"self", "params", "kwargs", *BY_KEY}
    arguments: dict[str, Any] = {}
    for key, text in (pair.split("=") for pair in (optim_args or "").split(",") if pair):
        if key not in known:
            cure = did_you_mean(key, known) if known else "leave optim_args out; it has keys of the recipe for its own"
            cure = f"set the recipe's {BY_KEY[key]}" if key in BY_KEY else cure
            raise UserError(place, f"{name} has no argument {key!r}", cure)
        value = parse_yaml(text)
        if key in NAMES:
            if value not in NAMES[key]:
                raise UserError(place, f"{key} is {text!r}", f"give one of {', '.join(NAMES[key])}")
            arguments[key] = value
            continue
        try:
            arguments[key] = value if isinstance(value, bool | int) else float(value)  # 1e-5 is a text to YAML
        except (TypeError, ValueError):
            raise UserError(place, f"{key} is {text!r}", "give a number, true or false") from None
    return arguments


def own_optimizer(
    name: str, args: TrainingArguments, optim_args: str | None
) -> tuple[type[torch.optim.Optimizer], Keywords]:
    """Class and arguments of an optimizer that Transformers does not have, for Trainer's optimizer_cls_and_kwargs.

    args: TrainingArguments; optim_args: "key=value,key=value" of the optimizer's own, e.g. "trust_coefficient=0.02".
    """
    options = parse_arguments(name, optim_args, "optim_args")
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay} | options
    if name != "lars":
        options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon} | options
    if name == "schedule_free_adamw":
        from .schedule_free import ScheduleFreeAdamW

        return ScheduleFreeAdamW, {"warmup": args.warmup_steps} | options
    if name == "muon":
        # Transformers' callbacks import bitsandbytes: seconds, unless within quick_imports()
        from ..engines.muon import Muon

        return Muon, options
    # foreach: its batched path mixes DTensors and plain tensors.
    return _whole_parameter_optimizer(name), {"foreach": False} | options


def _whole_parameter_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class of LAMB or LARS."""
    base = _base(name)

    class WholeParameter(base):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
            with _WholeNorms():
                loss = super().step(closure)
            for state in self.state.values():
                for figure in _FIGURES:  # kept for whoever looks; FSDP2 saves them as tensors and cannot load them
                    state.pop(figure, None)
            return loss

    WholeParameter.__name__ = WholeParameter.__qualname__ = base.__name__
    return WholeParameter
