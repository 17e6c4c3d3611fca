"""Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .contract import Options, Pairs, Result, figures_of

CERTAIN = -(2**-24)  # a token's log-probability: half of fp32's step below 1


def loss(pairs: Pairs, options: Options) -> Result:
    """Return the losses of pairs: the chosen answer's mean negative log-probability, and beta times -log sigmoid of the log odds
    ratio of chosen and rejected (equations 6 and 7, where beta is called lambda)."""
    chosen, rejected = pairs.means
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    ratio = logsigmoid(log_odds)
    figures = figures_of(pairs, options.beta * chosen, options.beta * rejected)
    own = {"nll_loss": -chosen, "log_odds_chosen": log_odds, "log_odds_ratio": ratio}  # by TRL's names
    return Result(-chosen - options.beta * ratio, figures | own)


def _log_odds(log_probability: Tensor) -> Tensor:
    """Return log(p / (1 - p)) from log p: (pairs,). One that is closer to 0 than CERTAIN, which fp32 rounds to 0, counts as
    CERTAIN, and passes on the gradient from there."""
    bounded = log_probability - torch.relu(log_probability - CERTAIN).detach()
    return bounded - torch.log(-torch.expm1(bounded))
