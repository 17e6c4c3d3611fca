"""Held-out answers compared by a model that a run has saved, in a fresh process: each separately, by its own forward pass."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...data.answers import DESIRABLE, MISMATCHED, last_tokens, samples_of
from ...data.store import IGNORED, TokenSequence
from ...recipe.objectives import objective_of
from ...recipe.settings import Settings
from ...recipe.training_section import TrainingSection
from .contract import compare, means_of
from .load import loss_of, options_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def log_probabilities(
    model: "PreTrainedModel", sequences: Sequence[TokenSequence], scores: bool, pad_token_id: int
) -> torch.Tensor:
    """Return the log-probability of each answer in nats, or its score: (answers,) in float64.

    scores: whether the model is a reward model
    """
    found = []
    for sample in (sample for sequence in sequences for sample in samples_of(sequence)):
        ids = torch.from_numpy(sample["input_ids"].astype("int64"))[None].to(model.device)
        if scores:
            end = int(last_tokens([sample], pad_token_id)[0]) + 1
            found.append(model(input_ids=ids[:, :end]).logits[0, 0].double().cpu())
            continue
        labels = torch.from_numpy(sample["labels"])[1:].to(model.device)
        logits = model(input_ids=ids).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        found.append(-losses.double().sum().cpu())
    return torch.stack(found)


class Known(NamedTuple):
    """What a model says of held-out answers. own: their log-probabilities or scores, (answers,); others: log-probabilities of the
    answers to other prompts, likewise, where answers are labelled; else None"""

    own: torch.Tensor
    others: torch.Tensor | None


def known_of(
    training: TrainingSection, model: "PreTrainedModel", sequences: Sequence[TokenSequence], pad_token_id: int
) -> Known:
    """Return what a model, or the reference, says of held-out answers."""
    objective = objective_of(training)
    own = log_probabilities(model, sequences, objective.scores, pad_token_id)
    others = [each[MISMATCHED] for each in sequences if MISMATCHED in each]
    return Known(own, log_probabilities(model, others, False, pad_token_id) if others else None)


def judge(
    settings: Settings, sequences: Sequence[TokenSequence], found: Known, reference: Known | None
) -> Mapping[str, float]:
    """Return the mean loss and figures of held-out answers. reference: None where there is none"""
    training = settings.recipe.training
    tokens = [int((sample["labels"] != IGNORED).sum()) for each in sequences for sample in samples_of(each)]
    about: list[Any] = [torch.tensor(tokens), reference and reference.own]
    if found.others is not None and reference is not None:
        divergence = (found.others - reference.others).mean().clamp(min=0)
        about += [torch.tensor([bool(good) for each in sequences for good in each[DESIRABLE]]), divergence]
    result = compare(loss_of(settings), options_of(training), found.own, *about)
    return means_of(result)
