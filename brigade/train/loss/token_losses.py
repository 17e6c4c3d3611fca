"""A causal language model that returns the loss of each token, where an objective wants to know an answer's probability."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ..data.store import IGNORED
from ..model import trial

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def apply(model: "PreTrainedModel") -> None:
    """Let a causal language model of Transformers return as its loss what token_losses() gives. Call it before adapters and
    engines wrap the model."""
    model.loss_function = token_losses


def token_losses(
    logits: Tensor, labels: Tensor | None = None, *_: object, shift_labels: Tensor | None = None, **__: object
) -> Tensor:
    """Return the negative log-probability of each target, in nats; 0 where it is IGNORED: (targets,) in fp32.

    logits: (sequences, tokens, vocabulary); labels, shift_labels: (sequences, tokens), of which one may be None: targets are the
    second, or the first shifted by one token. The signature is that of Transformers' loss functions (loss/loss_utils.py).
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.flatten(0, -2).float(), targets, ignore_index=IGNORED, reduction="none")


def why_not(config: "PreTrainedConfig", trust_remote_code: bool = False) -> str:
    """Return why the model of this config does not return the loss of each token, "" where it does: a tiny random one of its
    architecture is asked for that of one text."""

    def ask() -> str:
        model = trial.tiny_model(config, trust_remote_code=trust_remote_code)
        apply(model)
        tokens = torch.arange(7, 23)[None]
        with torch.inference_mode():
            given = model(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=2)
            wanted = cross_entropy(given.logits[0, :-1].float(), tokens[0, 1:], reduction="none")
        if given.loss.shape != (16,) or (given.loss[:-1] - wanted).abs().max() > 1e-4 * wanted.max():
            return "its forward pass makes something else of them"
        return ""

    return trial.why_not(ask)
