"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306)."""

import torch

from .contract import Judged, Options, Result


def loss(judged: Judged, options: Options) -> Result:
    """Return the losses of answers.

    kto: w (1 - sigmoid(beta (r - z))) of good ones, w (1 - sigmoid(beta (z - r))) of bad ones, r being the log-ratio, z the
        divergence, and w the weight of good or bad answers (equations 7 and 8)
    apo_zero_unpaired: the same without z (D'Oosterlinck et al. 2024, arXiv 2408.06266)
    """
    good, ratios = judged.desirable, judged.log_ratios
    apart = ratios if options.loss_type == "apo_zero_unpaired" else ratios - judged.divergence
    likely = torch.where(good, options.beta * apart, -options.beta * apart).sigmoid()
    weights = torch.where(good, options.desirable_weight, options.undesirable_weight)
    rewards = (options.beta * ratios).detach()
    figures = {
        "rewards/chosen": (rewards, good),
        "rewards/rejected": (rewards, ~good),
        "logps/chosen": (judged.answer, good),
        "logps/rejected": (judged.answer, ~good),
    }
    if options.loss_type != "apo_zero_unpaired":
        figures["kl"] = (judged.divergence.expand_as(rewards), torch.ones_like(good))
    return Result(weights * (1 - likely), figures)
