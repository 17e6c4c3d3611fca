"""Held-out answers compared by a model that a run has saved, in a fresh process: each answer by itself, by the model's own forward
pass."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..data.answers import DESIRABLE, MISMATCHED, last_tokens, samples_of
from ..data.store import IGNORED, TokenSequence
from ..recipe.objectives import JUDGED, objective_of
from ..recipe.schema import TrainingSection
from .load import loss_of, options_of
from .log_probabilities import compare


@torch.inference_mode()
def log_probabilities(model: Any, sequences: Sequence[TokenSequence], scores: bool, pad_token_id: int) -> torch.Tensor:
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


def judge(
    training: TrainingSection, place: str, model: Any, base: Any, sequences: Sequence[TokenSequence], pad_token_id: int
) -> Mapping[str, float]:
    """Return the mean loss and figures of held-out answers.

    place: where the objective is named; base: the reference, None where there is none
    """
    objective = objective_of(training)
    found = log_probabilities(model, sequences, objective.scores, pad_token_id)
    reference = None if base is None else log_probabilities(base, sequences, False, pad_token_id)
    tokens = [int((sample["labels"] != IGNORED).sum()) for each in sequences for sample in samples_of(each)]
    about: list[Any] = [torch.tensor(tokens), reference]
    if objective.rows == JUDGED:
        others = [sequence[MISMATCHED] for sequence in sequences]
        ratios = log_probabilities(model, others, False, pad_token_id) - log_probabilities(
            base, others, False, pad_token_id
        )
        about += [torch.tensor([bool(each[DESIRABLE][0]) for each in sequences]), ratios.mean().clamp(min=0)]
    result = compare(loss_of(training, place), options_of(training), objective.rows, found, *about)
    figures = {"loss": float(result.losses.mean())}
    for name, figure in result.figures.items():
        values, which = figure if isinstance(figure, tuple) else (figure, torch.ones_like(figure))
        if which.any():
            figures[name] = float((values * which).sum() / which.sum())
    return figures
