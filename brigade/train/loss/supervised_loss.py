"""The cross-entropy of supervised tokens with what a recipe makes of it: label smoothing, z-loss, a function of the user's, and
weights of samples.

Sums over tokens, divided by the number that the model is told: neither accumulation nor the number of ranks changes them.
Held-out losses stay the plain cross-entropy.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad

from ...errors import UserError
from ..data.store import IGNORED
from ..distributed.process import this_process
from ..model import trial
from ..recipe.program import own_function
from ..recipe.settings import Settings
from . import loss_trial

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TRIED = 4096  # tokens
TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # losses and targets of tokens -> other losses


class Terms(NamedTuple):
    """What is added. smoothing: e of (1 - e) times the target's loss + e times the mean over the vocabulary (Szegedy et al. 2015,
    arXiv 1512.00567, section 7); z: the weight of log(Z)^2, which keeps logits small (PaLM, arXiv 2204.02311, section 5)
    own: what the recipe's token_loss makes of the losses of tokens, before z-loss is added: docs/extending.md"""

    smoothing: float = 0.0
    z: float = 0.0
    own: TokenLoss | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Terms":
        training = settings.recipe.training
        own = own_function(settings, "token_loss") if training.token_loss else None
        return cls(training.label_smoothing_factor, training.z_loss_coef, own)


PLAIN = Terms()


def targets_of(labels: torch.Tensor | None, shift_labels: torch.Tensor | None) -> torch.Tensor:
    """Return the label of each token for which there are logits: shift_labels, or else labels shifted by one token."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def weights_of_targets() -> torch.Tensor | None:
    """Return the weight of each target of this forward pass: fp32 (targets,); None where all weigh 1."""
    found = this_process.forward_pass.weights
    return None if found is None else found.reshape(-1)


def of_tokens(
    logits: torch.Tensor,
    targets: torch.Tensor,
    terms: Terms,
    reduction: str = "sum",
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over targets in fp32, or with `none` the loss of each; 0 where a target is IGNORED.

    logits: (targets, vocabulary); targets: (targets,); weights: of the targets' losses: (targets,)
    """
    if weights is not None:
        losses = of_tokens(logits, targets, terms, "none") * weights
        return losses.sum() if reduction == "sum" else losses
    logits = logits.float()
    each = "none" if terms.own else reduction
    losses = cross_entropy(logits, targets, ignore_index=IGNORED, reduction=each, label_smoothing=terms.smoothing)
    if terms.own:
        losses = _by_function(terms.own, losses, targets)
        losses = losses.sum() if reduction == "sum" else losses
    if not terms.z:
        return losses
    squares = logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0.0)
    return losses + terms.z * (squares.sum() if reduction == "sum" else squares)


def _by_function(own: TokenLoss, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return what the user's function makes of the losses of tokens; 0 where a target is IGNORED. There the function sees a loss
    of 1 and token 0, so that whatever it computes is finite, and so is its gradient."""
    ignored = targets == IGNORED
    made = own(losses.masked_fill(ignored, 1.0), targets.masked_fill(ignored, 0))
    return made.masked_fill(ignored, 0.0)


def apply(model: "PreTrainedModel", terms: Terms) -> None:
    """Let a causal language model add these terms while it trains. Call it before adapters and engines wrap the model."""
    model.loss_function = partial(_of_model, model, terms)


def _of_model(
    model: "PreTrainedModel",
    terms: Terms,
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    *_: object,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    **__: object,
) -> torch.Tensor:
    """Except for the first two arguments, the signature is that of Transformers' loss functions (loss/loss_utils.py)."""
    targets = targets_of(labels, shift_labels).reshape(-1).to(logits.device)
    weighs = weights_of_targets() if model.training else None
    whole = of_tokens(logits.flatten(0, -2), targets, terms if model.training else PLAIN, weights=weighs)
    return whole / ((targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def check(settings: Settings, config: "PreTrainedConfig") -> None:
    """Raise UserError where a model computes something else with these terms, as a tiny random one of its architecture shows."""
    training, place = settings.recipe.training, settings.place("token_loss")
    terms, vocabulary = Terms.of(settings), config.get_text_config().vocab_size
    why = _breaks_contract(lambda: own_function(settings, "token_loss"), vocabulary) if terms.own else ""
    if why:
        cure = "return a tensor with a number for each token, by its own loss and target alone (docs/extending.md)"
        raise UserError(place, f"{training.token_loss}: {why}", cure)
    weighs = settings.recipe.data.weighs_samples
    changes = terms != PLAIN or weighs
    why = _differs(config, settings.recipe.model.trust_remote_code) if changes else ""
    if why:
        key = "token_loss" if terms.own else "label_smoothing_factor" if terms.smoothing else "z_loss_coef"
        key = "columns" if terms == PLAIN else key
        raise UserError(
            settings.place(key), f"{type(config).__name__} does not compute its loss by it: {why}", "leave it out"
        )


def _breaks_contract(load: Callable[[], TokenLoss], vocabulary: int) -> str:
    """Return in which way a function is not one of single tokens; "" where it is. load: returns it, before its first call"""

    def loaded() -> loss_trial.Function:
        own = load()
        return lambda given: {"its result": own(given["losses"], given["targets"])}

    draws = np.random.default_rng(0)
    targets = vocabulary * draws.random(TRIED) ** 3  # some of them often
    tokens = {
        "losses": torch.from_numpy(draws.permutation(np.geomspace(1e-3, 15, TRIED, dtype=np.float32))).requires_grad_(),
        "targets": torch.from_numpy(targets.astype(np.int64)),
    }
    return loss_trial.why_not(loaded, tokens, "token")


def _differs(config: "PreTrainedConfig", trust_remote_code: bool) -> str:
    """Return why a tiny model's loss with both terms is not what of_tokens() gives for its logits, or ""."""
    terms = Terms(0.1, 0.01)

    def ask() -> str:
        model = trial.tiny_model(config, trust_remote_code=trust_remote_code)
        apply(model, terms)
        tokens, given = torch.arange(7, 23)[None], {"use_cache": False, "num_items_in_batch": 2}
        with torch.no_grad():
            plain, weights = model(input_ids=tokens, labels=tokens, **given), torch.linspace(0, 2, 16)
            for module in (each for each in model.modules() if type(each).__name__ == type(model).__name__):
                module.training = True  # of the model alone: dropout would change its logits
            with this_process.forward_pass.told(weights=weights[None]):
                loss = model(input_ids=tokens, labels=tokens, **given).loss
        wanted = of_tokens(plain.logits[0, :-1], tokens[0, 1:], terms, weights=weights[:-1]) / 2
        return "" if torch.isclose(loss, wanted, rtol=1e-4) else "its forward pass computes a loss of its own"

    return trial.why_not(ask)
