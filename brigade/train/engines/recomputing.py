"""Activation checkpointing: which layers compute again in the backward pass, what they keep, and where that waits.

Transformers checkpoints every layer, or every so many-th (modeling_utils.py: activation_checkpointing_enable). What is kept
selectively is torch's (torch.utils.checkpoint: create_selective_checkpoint_contexts), and so is what waits in host memory:
Transformers asks for page-locked memory also where there is no GPU, and fails.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from ...errors import UserError
from ..model.sample_by_sample import Samples
from ..recipe.settings import Settings
from ..recipe.training_section import TrainingSection
from ..upstream.stateful_layers import checkpoint_by, recompute_within

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Parts of the names of operators that compute attention without scores in memory: torch's own, varlen's and FlashAttention's.
ATTENTION = ("scaled_dot_product", "varlen_attn", "flash_attn", "flash_attention", "flex_attention")


def options(training: TrainingSection) -> dict[str, int]:
    """Return Transformers' options of activation checkpointing (TrainingArguments.activation_checkpointing_kwargs)."""
    again = training.recomputation
    # The reentrant form finds no input that requires a gradient where embeddings are frozen, and breaks DDP's hooks.
    return {"use_reentrant": False, "every_n_layers": again.layers}


def enable(model: torch.nn.Module, training: TrainingSection) -> None:
    """Let a model's layers compute again what options() says. Call it before an engine wraps the model."""
    given = options(training)
    every = given.pop("every_n_layers")
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=given, every_n_layers=every)


def check(model: PreTrainedModel, settings: Settings) -> None:
    """Raise UserError for a model of which Transformers checkpoints no layer, or every one whatever the recipe asks for."""
    again, place = settings.recipe.training.recomputation, settings.place("activation_checkpointing")
    if again.layers and not model.supports_gradient_checkpointing:
        raise UserError(place, f"the code of {type(model).__name__} has no activation checkpointing", "set it to false")
    if again.layers and not again.plain and not _checkpoints_by_layer(model):
        problem = f"the code of {type(model).__name__} knows activation checkpointing of all layers only"
        raise UserError(place, problem, "set it to true")


def begin(model: torch.nn.Module, samples: Samples | None, settings: Settings) -> None:
    """Give the layers of a wrapped model the contexts of their two passes.

    samples: what divides its passes by samples, where it does
    """
    again = settings.recipe.training.recomputation
    makers: list[Callable[[], Contexts]] = [samples.contexts] if samples else []
    makers += [kept_contexts] if again.selective else []
    if makers:
        recompute_within(model, lambda: _together(makers))
    if again.offload:
        checkpoint_by(model, _keep_on_host)


def _checkpoints_by_layer(model: torch.nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def _keep_on_host(checkpoint: Callable[..., object], *given: object, **options: object) -> object:
    """Checkpoint a layer whose inputs wait in host memory, page-locked beside a GPU. Both copies are on the computing stream."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(*given, **options)


def _together(makers: list[Callable[[], Contexts]]) -> Contexts:
    """Return one context for each pass that enters those of all makers."""
    forward, again = zip(*(make() for make in makers), strict=True)
    return _entered(forward), _entered(again)


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def kept_contexts() -> Contexts:
    """Return the contexts of a layer's forward pass and of its recomputation, which takes over what the first has kept: what
    attention gave, and every second product with a weight, the first among them (torchtitan's "selective op")."""
    products = 0

    def keeps(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        nonlocal products
        if operator in PRODUCTS:
            products += 1
            kept = products % 2 == 1
        else:
            kept = any(part in str(operator) for part in ATTENTION) and "backward" not in str(operator)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keeps)  # type: ignore[no-any-return]
