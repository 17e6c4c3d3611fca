"""The cross-entropy of supervised tokens with what a recipe adds to it: label smoothing and z-loss.

Sums over tokens, divided by the number that the model is told: neither accumulation nor the number of ranks changes them.
Held-out losses stay the plain cross-entropy.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, pad

from ...errors import UserError, first_line
from .. import upstream
from ..data.store import IGNORED
from ..recipe.flags import Settings
from ..recipe.training_section import TrainingSection
from .tiny import shrink


class Terms(NamedTuple):
    """What is added. smoothing: e of (1 - e) times the target's loss + e times the mean over the vocabulary (Szegedy et al. 2015,
    arXiv 1512.00567, section 7); z: the weight of log(Z)^2, which keeps logits small (PaLM, arXiv 2204.02311, section 5)"""

    smoothing: float = 0.0
    z: float = 0.0

    @classmethod
    def of(cls, training: TrainingSection) -> "Terms":
        return cls(training.label_smoothing_factor, training.z_loss_coef)


PLAIN = Terms()


def of_tokens(logits: torch.Tensor, targets: torch.Tensor, terms: Terms, reduction: str = "sum") -> torch.Tensor:
    """Return the sum over targets in fp32, or with `none` the loss of each; 0 where a target is IGNORED.

    logits: (targets, vocabulary); targets: (targets,)
    """
    logits = logits.float()
    losses = cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction, label_smoothing=terms.smoothing)
    if not terms.z:
        return losses
    squares = logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0.0)
    return losses + terms.z * (squares.sum() if reduction == "sum" else squares)


def apply(model: Any, terms: Terms) -> None:
    """Let a causal language model add these terms while it trains. Call it before adapters and engines wrap the model."""
    model.loss_function = partial(_of_model, model, terms)


def _of_model(
    model: Any,
    terms: Terms,
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    *_: Any,
    num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor:
    """The signature, but for the first two, is that of Transformers' loss functions (loss/loss_utils.py)."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    whole = of_tokens(logits.flatten(0, -2), targets, terms if model.training else PLAIN)
    return whole / ((targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def check(settings: Settings, config: Any) -> None:
    """Raise UserError where a model computes something else with these terms, as a tiny random one of its architecture shows."""
    training = settings.recipe.training
    if (terms := Terms.of(training)) != PLAIN and (why := _differs(config, settings.recipe.model.trust_remote_code)):
        key = "label_smoothing_factor" if terms.smoothing else "z_loss_coef"
        raise UserError(
            settings.place(key), f"{type(config).__name__} does not add it to its loss: {why}", "leave it out"
        )


def _differs(config: Any, trust_remote_code: bool) -> str:
    """Return why a tiny model's loss with both terms is not what of_tokens() gives for its logits, or ""."""
    from transformers import AutoModelForCausalLM

    terms = Terms(0.1, 0.01)
    with upstream.without_zero3(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        try:
            tiny = type(config).from_dict(shrink(config.to_dict()))
            model = AutoModelForCausalLM.from_config(tiny, trust_remote_code=trust_remote_code, dtype=torch.float32)
            apply(model.eval(), terms)
            tokens, given = torch.arange(7, 23)[None], {"use_cache": False, "num_items_in_batch": 2}
            plain = model(input_ids=tokens, labels=tokens, **given)
            for module in (each for each in model.modules() if type(each).__name__ == type(model).__name__):
                module.training = True  # of the model alone: dropout would change its logits
            found = model(input_ids=tokens, labels=tokens, **given).loss
            own = of_tokens(plain.logits[0, :-1], tokens[0, 1:], terms) / 2
        except Exception as error:  # what cannot be tried is not trusted
            return f"a tiny model to try it with fails ({type(error).__name__}: {first_line(error)})"
        return "" if torch.isclose(found, own, rtol=1e-4) else "its forward pass computes a loss of its own"
