"""What an objective is given, and what it returns. A user's own objective keeps the same contract (docs/extending.md)."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...data import answers as of_batch
from ...data.store import MicroBatch


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

    def totals(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield of each figure its name, the sum of its values, and how many count: scalars."""
        for name, figure in self.figures.items():
            values, which = figure if isinstance(figure, tuple) else (figure, torch.ones_like(figure))
            yield name, (values * which).sum(), which.sum()


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
    means |= {name: float(total) / float(count) for name, total, count in result.totals() if count}
    return means | margin_of(means)


def margin_of(means: Mapping[str, float]) -> dict[str, float]:
    """Return {"rewards/margins": ...} of means over good and over bad answers, whose margin is the difference, as TRL logs it; {}
    where the margin is there already, or one of the two means is missing."""
    better, worse = means.get("rewards/chosen"), means.get("rewards/rejected")
    if better is None or worse is None or "rewards/margins" in means:
        return {}
    return {"rewards/margins": better - worse}


def sums(token_losses: torch.Tensor, answers: MicroBatch) -> torch.Tensor:
    """Return the log-probability of each answer, in nats: (answers,) in fp64, in the batch's order.

    token_losses: of each target, (targets,), as loss/own_loss.py gives them; answers: ANSWERS of the micro-batch
    """
    # In order, and thus the same each time: a scattered sum on a GPU is not. Without a look at the runs, for which it would wait.
    # In fp64: a log-ratio is a small difference of two sums, and in fp32 those of 100,000 tokens are rounded to 0.03.
    of_samples = torch.segment_reduce(token_losses.double(), "sum", lengths=answers[of_batch.RUNS], unsafe=True)
    return -of_samples[answers[of_batch.WHICH]]


def compare(
    loss: Loss,
    options: Options,
    found: torch.Tensor,
    tokens: torch.Tensor,
    reference: torch.Tensor | None,
    desirable: torch.Tensor | None = None,
    divergence: torch.Tensor | None = None,
) -> Result:
    """Return what an objective makes of answers. Each tensor is (answers,), but for the divergence, a scalar.

    found: log-probabilities; desirable: None for pairs, whose answers alternate, chosen and rejected; others: as in contract.py
    """
    tokens = tokens.to(found.dtype)
    if desirable is not None:
        return Result(*loss(Judged(found, tokens, reference, desirable, divergence), options))  # type: ignore[arg-type]
    known = () if reference is None else (reference[::2], reference[1::2])
    return Result(*loss(Pairs(found[::2], found[1::2], tokens[::2], tokens[1::2], *known), options))  # type: ignore[arg-type]
