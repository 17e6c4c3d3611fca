"""A causal language model that returns the loss of each token, where an objective wants to know an answer's probability."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad

from ..data.store import IGNORED


def apply(model: Any) -> None:
    """Let a causal language model of Transformers return as its loss what token_losses() gives. Call it before adapters and
    engines wrap the model."""
    model.loss_function = token_losses


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor | None = None, *_: Any, shift_labels: Any = None, **__: Any
) -> torch.Tensor:
    """Return the negative log-probability of each target, in nats; 0 where it is IGNORED: (targets,) in fp32.

    logits: (sequences, tokens, vocabulary); labels, shift_labels: (sequences, tokens), of which one may be None: targets are the
    second, or the first shifted by one token. The signature is that of Transformers' loss functions (loss/loss_utils.py).
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.flatten(0, -2).float(), targets, ignore_index=IGNORED, reduction="none")
