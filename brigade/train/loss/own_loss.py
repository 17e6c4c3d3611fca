"""The loss that a model computes itself: by tiles, by token or with further terms, where the recipe asks for one. Whether it is a
sum, divided by the number that the model is told, is tried, not assumed."""

import ast
import inspect

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.store import IGNORED
from ..model import trial
from ..model.experts import without_router_loss
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import supervised_loss, tiled

MANY = 2**20  # items of a step, by which fp32 divides without rounding


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
        given = {"input_ids": tokens, "labels": tokens, "use_cache": False} | without_router_loss(config)
        with torch.inference_mode():
            found = model(**given, num_items_in_batch=2)
            wanted = cross_entropy(found.logits[0, :-1].float(), tokens[0, 1:], reduction="none")
        if found.loss.shape != (16,) or (found.loss[:-1] - wanted).abs().max() > 1e-4 * wanted.max():
            return "its forward pass makes something else of them"
        return ""

    return trial.why_not(ask)


def is_doubtful(model: PreTrainedModel, says: bool) -> bool:
    """Whether a model has to be tried: it says that its loss takes no number, or its forward pass, which takes any keyword, hands
    the loss to something else than Transformers' loss functions (CPM-Ant, TrOCR), or makes something else of theirs (Bamba).

    says: what Transformers makes of its signature (Trainer.model_accepts_loss_kwargs)
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not says or not isinstance(base, PreTrainedModel):  # a stage of a pipeline has no loss of its own
        return not says
    return changes_loss(inspect.getsource(inspect.unwrap(type(base).forward)))


def changes_loss(forward: str) -> bool:
    """Whether a forward pass with this source calls no self.loss_function(), or calculates with what that returns. Transformers'
    term for routers (aux_loss) is left out of account: a model is told not to add it."""
    # Not dedent(), which a docstring at the left margin defeats.
    nodes = list(ast.walk(ast.parse(("if True:\n" if forward[:1].isspace() else "") + forward)))
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    losses = {call for call in calls if call.startswith("self.loss_function(")}
    named = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.value) in losses]
    losses |= {ast.unparse(target) for node in named for target in node.targets}
    terms = [
        node for node in nodes if isinstance(node, ast.BinOp | ast.AugAssign) and "aux_loss" not in ast.unparse(node)
    ]
    return not losses or any(ast.unparse(part) in losses for term in terms for part in ast.iter_child_nodes(term))


def why_not_divided(config: PreTrainedConfig, trust_remote_code: bool = False, images: bool = False) -> str:
    """Return why the loss of this config's model is not a sum divided by num_items_in_batch, or "" where it is one.

    Transformers marks most models of images and texts so (accepts_loss_kwargs, Transformers issue 37208), also Gemma 4's, whose
    loss function takes the number. A tiny random model is asked for its loss of one text, with two numbers. The second is large:
    it shows each term that is not divided by it.

    images: whether it is built with its vision tower
    """

    def ask() -> str:
        model = trial.tiny_model(config, images, trust_remote_code=trust_remote_code)
        tokens = torch.arange(7, 23)[None]
        given = {"input_ids": tokens, "labels": tokens, "use_cache": False} | without_router_loss(config)
        with torch.inference_mode():
            one, many = (model(**given, num_items_in_batch=number) for number in (1, MANY))
            summed = float(cross_entropy(one.logits[0, :-1].float(), tokens[0, 1:], reduction="sum"))
        whole, part = float(one.loss), float(many.loss)
        if whole == part:
            return "it takes no num_items_in_batch"
        if abs(whole - summed) > 1e-4 * whole or abs(MANY * part - whole) > 1e-4 * whole:
            return "it is not a sum over tokens, divided by num_items_in_batch"
        return ""

    return trial.why_not(ask)
