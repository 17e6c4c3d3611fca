"""A causal language model that returns the loss of each token, where an objective wants to know an answer's probability."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad

from ...errors import first_line
from .. import upstream
from ..data.store import IGNORED
from .tiny import shrink


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


def why_not(config: Any, trust_remote_code: bool = False) -> str:
    """Return why the model of this config does not return the loss of each token, "" where it does: a tiny random one of its
    architecture is asked for that of one text."""
    from transformers import AutoModelForCausalLM

    with upstream.without_zero3(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode():
        torch.manual_seed(0)
        try:
            tiny = type(config).from_dict(shrink(config.to_dict()))
            model = AutoModelForCausalLM.from_config(tiny, trust_remote_code=trust_remote_code, dtype=torch.float32)
            apply(model.eval())
            tokens = torch.arange(7, 23)[None]
            found = model(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=2)
            own = cross_entropy(found.logits[0, :-1].float(), tokens[0, 1:], reduction="none")
        except Exception as error:  # what cannot be tried is not trusted
            return f"a tiny model to try it with fails ({type(error).__name__}: {first_line(error)})"
        if found.loss.shape != (16,) or (found.loss[:-1] - own).abs().max() > 1e-4 * own.max():
            return "its forward pass makes something else of them"
    return ""
