"""Which of Transformers' layers carry a state from token to token."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# Delta rules (gated, Kimi's), state spaces (Mamba), short convolutions, lightning attention, RWKV's shifts and ZAYA's
# convolutions over projections. Where one is missing here, model/packed_samples.py finds out, and the model's samples are padded.
_CLASSES = re.compile(
    r"GatedDeltaNet|DeltaAttention|LightningAttention|ShortConv(olution)?|RecurrentBlock|RwkvSelfAttention|RwkvFeedForward"
    r"|CCAProjection|(Bamba|FalconH1|Mamba|Mamba2)Mixer|MambaLayer"
)


def is_stateful(module: torch.nn.Module) -> bool:
    """Whether a module's output for a token depends on the tokens before it in another way than by attention."""
    return any(_CLASSES.search(kind.__name__) for kind in type(module).__mro__[:-2])


# How Transformers names a function of a package that stands in for torch's own (integrations/hub_kernels.py).
_FALLBACK = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)"')
# Module of such a package -> the name by which it is installed.
PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}


def missing_packages(model: torch.nn.Module) -> list[str]:
    """Return the packages that this host lacks, and without which a model's stateful layers compute in torch: exactly, but
    slowly, and with several times the memory."""
    rooms = {sys.modules[type(module).__module__] for module in model.modules() if is_stateful(module)}
    named = {package for room in rooms for package in _FALLBACK.findall(inspect.getsource(room))}
    return sorted(PACKAGES.get(package, package) for package in named if find_spec(package) is None)


def recompute_within(
    model: torch.nn.Module, contexts: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
) -> None:
    """Let each layer that is computed again in the backward pass (activation checkpointing) enter these contexts, one in each of
    its two passes: context_fn of torch.utils.checkpoint (modeling_utils.py: _gradient_checkpointing_func)."""
    checkpoint_by(model, partial(_with_contexts, contexts))


def _with_contexts(contexts: object, checkpoint: Callable[..., object], *given: object, **options: object) -> object:
    return checkpoint(*given, context_fn=contexts, **options)


def checkpoint_by(model: torch.nn.Module, wrapper: Callable[..., object]) -> None:
    """Let each layer that is computed again call wrapper(what it called so far, its arguments ...)."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = partial(wrapper, module._gradient_checkpointing_func)
