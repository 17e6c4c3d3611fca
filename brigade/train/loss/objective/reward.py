"""A reward model (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155)."""

from torch.nn.functional import logsigmoid

from .contract import Options, Pairs, Result


def loss(pairs: Pairs, options: Options) -> Result:
    """Return the losses of pairs: -log sigmoid(score of chosen - score of rejected) (equation 1 of arXiv 2203.02155)."""
    margin = pairs.chosen - pairs.rejected
    figures = {
        "rewards/chosen": pairs.chosen,
        "rewards/rejected": pairs.rejected,
        "rewards/accuracies": (margin > 0).float(),
        "rewards/margins": margin,
    }
    return Result(-logsigmoid(margin), figures)
