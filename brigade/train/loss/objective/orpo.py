"""Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .contract import Options, Pairs, Result, figures_of


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
    """Return log(p / (1 - p)) from log p, which is below 0: (pairs,)"""
    return log_probability - torch.log(-torch.expm1(log_probability))
