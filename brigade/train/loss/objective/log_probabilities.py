"""The log-probabilities of answers, and what an objective makes of them."""

import torch

from ...data import answers as of_batch
from ...data.store import MicroBatch
from .contract import Judged, Loss, Options, Pairs, Result


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
        return loss(Judged(found, tokens, reference, desirable, divergence), options)  # type: ignore[arg-type]
    known = () if reference is None else (reference[::2], reference[1::2])
    return loss(Pairs(found[::2], found[1::2], tokens[::2], tokens[1::2], *known), options)  # type: ignore[arg-type]
