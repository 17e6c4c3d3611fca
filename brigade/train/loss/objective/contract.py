"""What an objective is given, and what it returns. One of a user's own keeps the same contract (docs/extending.md)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """The keys of a recipe that losses read (docs/preferences.md says what each means)."""

    beta: float
    loss_type: str
    label_smoothing: float
    simpo_gamma: float
    desirable_weight: float
    undesirable_weight: float


class NoReference(ValueError):
    """An objective compares with a reference, and the recipe names none."""


class Pairs(NamedTuple):
    """Pairs of a better and a worse answer. Each tensor is (pairs,), in fp64.

    chosen, rejected: sums of the log-probabilities of an answer's tokens, in nats, with gradients; for a reward model its scores
    chosen_tokens, rejected_tokens: how many tokens an answer has
    reference_chosen, reference_rejected: sums under the reference; None where the recipe has none
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return the log-ratios of model and reference, of chosen and rejected: (pairs,) each. Raises NoReference where there is
        none."""
        if self.reference_chosen is None or self.reference_rejected is None:
            raise NoReference("it compares with a reference, and the recipe names none")
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of chosen and rejected, as means over an answer's tokens: (pairs,) each."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class Judged(NamedTuple):
    """Answers that are labelled good or bad. Each tensor is (answers,), in fp64 but for `desirable`, which is bool.

    answer: sums of the log-probabilities of its tokens, in nats, with gradients; tokens: how many it has
    reference: sums under the reference
    divergence: a scalar without gradient: how far the model is from the reference, over the step's global batch; at least 0
    """

    answer: Tensor
    tokens: Tensor
    reference: Tensor
    desirable: Tensor
    divergence: Tensor

    @property
    def log_ratios(self) -> Tensor:
        """Return the log-ratios of model and reference: (answers,)."""
        return self.answer - self.reference


class Result(NamedTuple):
    """losses: of each pair or answer, whose mean over the global batch is the step's loss
    figures: name -> values that are logged as means; (values, which of them count) where not all do
    """

    losses: Tensor
    figures: Mapping[str, Tensor | tuple[Tensor, Tensor]]


Loss = Callable[[Pairs, Options], Result] | Callable[[Judged, Options], Result]


def figures_of(pairs: Pairs, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return what is logged of pairs, by TRL's names. chosen, rejected: rewards, (pairs,) each"""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }


def means_of(result: Result) -> dict[str, float]:
    """Return the mean loss and figures of held-out pairs or answers: {"loss": ..., name: mean}, without those that have no
    values."""
    means = {"loss": float(result.losses.mean())}
    for name, figure in result.figures.items():
        values, which = figure if isinstance(figure, tuple) else (figure, torch.ones_like(figure))
        count = float(which.sum())
        if count:
            means[name] = float((values * which).sum()) / count
    return means | margin_of(means)


def margin_of(means: Mapping[str, float]) -> dict[str, float]:
    """Return {"rewards/margins": ...} of means over good and over bad answers, whose margin is the difference, as TRL logs it; {}
    where it is there, or one of the two is not."""
    better, worse = means.get("rewards/chosen"), means.get("rewards/rejected")
    if better is None or worse is None or "rewards/margins" in means:
        return {}
    return {"rewards/margins": better - worse}
