"""What a run computes with: attention, Liger's kernels, compiled layers, and the optimizer's form."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UserError
from .. import upstream
from ..data.collate import OF_THE_HEAD
from ..distributed import ranks
from ..distributed.process import this_process
from ..host.cluster import World
from ..model import attention
from ..recipe.settings import Settings
from ..run.directory import Kernels
from ..run.offers import Offers, Proofs
from ..strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def prove_kernels(
    settings: Settings, strategy: Strategy, world: World, config: PreTrainedConfig, offers: Offers
) -> Proofs:
    """Return what is proven on all of this run's GPUs (docs/gpu.md): `auto` takes the fastest of it. A collective."""
    # A run on a CPU proves nothing, and proofs have no vision tower.
    if any(ranks.gather(torch.cuda.is_available())) and not settings.recipe.data.images:
        return offers.prove_kernels(settings, strategy, world, config, has_compiler(gpu=True))
    return Proofs()


def choose_kernels(settings: Settings, strategy: Strategy, config: PreTrainedConfig, proofs: Proofs) -> Kernels:
    """What the run computes with, by its recipe (with proofs.values in it) and by what is proven. Raise UserError for an
    attention that does not compute what this model's does."""
    how, why = attention.choose(settings, config, strategy.axes.sequence > 1, proofs.attention)
    training, (liger, no_liger) = settings.recipe.training, choose_liger(settings)
    no_sharing = proofs.no_sharing if torch.cuda.is_available() else ""
    return Kernels(
        how, why, training.torch_compile, liger, training.optim, no_liger, why_uncompiled(settings), no_sharing
    )


def why_uncompiled(settings: Settings) -> str:
    """Return why layers are not compiled, where a recipe leaves that to proofs; else ""."""
    if settings.recipe.training.torch_compile or "torch_compile" not in settings.by_proof:
        return ""
    if not torch.cuda.is_available():
        return "off: nothing is proven without a GPU"
    return "off: not proven faster here, or in pieces under this strategy (docs/gpu.md)"


def choose_liger(settings: Settings) -> tuple[bool, str]:
    """Return whether Liger's kernels are used, and the reason if they were asked for and are not."""
    training, interpreted = settings.recipe.training, os.environ.get("TRITON_INTERPRET") == "1"
    if not training.use_liger_kernel:
        return False, ""
    # it takes bf16's bits for integers (docs/evidence/triton-kernels.md)
    if interpreted and (training.bf16 or training.fp16):
        return False, "off: Triton's interpreter (TRITON_INTERPRET=1) computes something else in half precision"
    if not torch.cuda.is_available() and not interpreted:
        return False, "off: its Triton kernels need a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return False, "off: pip install --no-deps -r requirements-gpu.txt"
    return True, ""


def has_compiler(gpu: bool) -> bool:
    """Whether this host has Triton's compiler, or inductor's."""
    compilers = [os.environ.get("CC", "gcc"), "clang"] if gpu else [os.environ.get("CXX", "g++")]
    return any(map(shutil.which, compilers))


def apply_liger(model: PreTrainedModel, place: str = "use_liger_kernel") -> None:
    """Put Liger's norms, rotary embedding and gated MLPs into a model, in place, before its loss, adapters and engines.

    Each computes with the weights of its own module alone, which every engine has whole there, or an element at a time, so
    that a tensor group's columns do not matter. Liger's losses multiply by the head's weight themselves, of which a rank may have
    a part: tiled_loss saves the same memory everywhere. Experts stay Transformers' grouped products, which axes divide.

    Raises UserError at `place` for a model that Liger does not know: Liger itself says nothing.
    """
    from transformers.integrations.liger import apply_liger_kernel

    before = _with_own_forward(model)
    modules = {type(module).__module__ for module in model.modules()}
    were = {name: dict(vars(sys.modules[name])) for name in modules if name.startswith("transformers.")}
    gated = not any(map(upstream.are_experts, model.modules()))
    losses = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    apply_liger_kernel(model, losses | {"swiglu": gated, "geglu": gated})
    for name, values in were.items():
        replaced = {key: value for key, value in values.items() if vars(sys.modules[name])[key] is not value}
        this_process.unfused[name] = replaced | this_process.unfused.get(name, {})
    if _with_own_forward(model) == before:
        raise UserError(place, f"Liger has no kernels for {model.config.model_type}", "leave it out")


def _with_own_forward(model: PreTrainedModel) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer, in place, and the loss, before an engine wraps or shards the model.

    All layers share one program, which takes a fraction of a whole model's time to make, and the engines' hooks stay as they are.
    One program serves every length: sizes are symbols from the start, and layers are not handed what only the head reads, the
    number of targets above all.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in base.modules():
        if type(module).__name__ in upstream.layer_classes(base):
            module.compile(dynamic=True)
    base.base_model.register_forward_pre_hook(_without_the_heads, with_kwargs=True)
    base.loss_function = torch.compile(base.loss_function, dynamic=True)


def _without_the_heads(_: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    return positional, {key: value for key, value in named.items() if key not in OF_THE_HEAD}
