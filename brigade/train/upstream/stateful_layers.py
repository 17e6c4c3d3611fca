"""Which of Transformers' layers carry a state from token to token."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

# Delta rules (gated, Kimi's), state spaces (Mamba), short convolutions, lightning attention, RWKV's shifts and ZAYA's
# convolutions over projections. Where one is missing here, model/packed_samples.py finds out, and the model's samples are padded.
_CLASSES = re.compile(
    r"GatedDeltaNet|DeltaAttention|LightningAttention|ShortConv(olution)?|RecurrentBlock|RwkvSelfAttention|RwkvFeedForward"
    r"|CCAProjection|(Bamba|FalconH1|Mamba|Mamba2)Mixer|MambaLayer"
)


def is_stateful(module: Any) -> bool:
    """Whether a module's output for a token depends on the tokens before it in another way than by attention."""
    return any(_CLASSES.search(kind.__name__) for kind in type(module).__mro__[:-2])


def recompute_within(
    model: Any, contexts: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
) -> None:
    """Let each layer that is computed again in the backward pass (activation checkpointing) enter these contexts, one in each of
    its two passes: context_fn of torch.utils.checkpoint (modeling_utils.py: _gradient_checkpointing_func)."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            again = partial(module._gradient_checkpointing_func, context_fn=contexts)
            module._gradient_checkpointing_func = again
