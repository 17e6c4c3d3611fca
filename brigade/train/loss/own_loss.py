"""The loss that a model computes itself: by tiles, by token or with further terms, where the recipe asks for one. Whether it is a
sum, divided by the number that the model is told, is tried, not assumed."""

import inspect

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.store import IGNORED
from ..model import trial
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import supervised_loss, tiled


def apply(model: PreTrainedModel, settings: Settings) -> None:
    """Let a model compute the loss of a recipe. Call it before adapters and engines wrap the model."""
    training, objective = settings.recipe.training, objective_of(settings.recipe.training)
    by_token = objective.compares and not objective.scores
    terms = supervised_loss.Terms.of(settings)
    if by_token:
        return_token_losses(model)
    elif terms != supervised_loss.PLAIN or settings.recipe.data.weighs_samples:
        supervised_loss.apply(model, terms)
    if training.loss_tiles or training.tiled_mlp:
        tiled.apply(model, training.loss_tiles, training.tiled_mlp, by_token, terms)


def return_token_losses(model: PreTrainedModel) -> None:
    """Let a causal language model of Transformers return as its loss what token_losses() gives. Call it before adapters and
    engines wrap the model."""
    model.loss_function = token_losses


def token_losses(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    *_: object,
    shift_labels: torch.Tensor | None = None,
    **__: object,
) -> torch.Tensor:
    """Return the negative log-probability of each target, in nats; 0 where it is IGNORED: (targets,) in fp32.

    logits: (sequences, tokens, vocabulary); labels, shift_labels: (sequences, tokens), of which one may be None: targets are the
    second, or the first shifted by one token. The signature is that of Transformers' loss functions (loss/loss_utils.py).
    """
    targets = supervised_loss.targets_of(labels, shift_labels).reshape(-1).to(logits.device)
    return cross_entropy(logits.flatten(0, -2).float(), targets, ignore_index=IGNORED, reduction="none")


def why_no_token_losses(config: PreTrainedConfig, trust_remote_code: bool = False) -> str:
    """Return why the model of this config does not return the loss of each token, "" where it does: a tiny random one of its
    architecture is asked for that of one text."""

    def ask() -> str:
        model = trial.tiny_model(config, trust_remote_code=trust_remote_code)
        return_token_losses(model)
        tokens = torch.arange(7, 23)[None]
        with torch.inference_mode():
            given = model(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=2)
            wanted = cross_entropy(given.logits[0, :-1].float(), tokens[0, 1:], reduction="none")
        if given.loss.shape != (16,) or (given.loss[:-1] - wanted).abs().max() > 1e-4 * wanted.max():
            return "its forward pass makes something else of them"
        return ""

    return trial.why_not(ask)


def is_doubtful(model: PreTrainedModel, says: bool) -> bool:
    """Whether a model has to be tried: it says that its loss takes no number, or its forward pass, which takes any keyword, hands
    the loss to something else than Transformers' loss functions (CPM-Ant, TrOCR).

    says: what Transformers makes of its signature (Trainer.model_accepts_loss_kwargs)
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not says or not isinstance(base, PreTrainedModel):  # a stage of a pipeline has no loss of its own
        return not says
    return "self.loss_function(" not in inspect.getsource(inspect.unwrap(type(base).forward))


def why_not_divided(config: PreTrainedConfig, trust_remote_code: bool = False, images: bool = False) -> str:
    """Return why the loss of this config's model is not a sum divided by num_items_in_batch, or "" where it is one.

    Transformers marks most models of images and texts so (accepts_loss_kwargs, Transformers issue 37208), also Gemma 4's, whose
    loss function takes the number. A tiny random model is asked for its loss of one text, with two numbers.

    images: whether it is built with its vision tower
    """

    def ask() -> str:
        model = trial.tiny_model(config, images, trust_remote_code=trust_remote_code)
        tokens = torch.arange(7, 23)[None]
        with torch.inference_mode():
            one, four = (
                model(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=number) for number in (1, 4)
            )
            summed = float(cross_entropy(one.logits[0, :-1].float(), tokens[0, 1:], reduction="sum"))
        whole, quarter = float(one.loss), float(four.loss)
        if abs(whole - summed) > 1e-4 * whole or abs(4 * quarter - whole) > 1e-4 * whole:
            return "it takes no num_items_in_batch"
        return ""

    return trial.why_not(ask)
