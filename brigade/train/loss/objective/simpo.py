"""Simple preference optimization (Meng et al. 2024, arXiv 2405.14734)."""

from torch.nn.functional import logsigmoid

from .contract import Options, Pairs, Result, figures_of


def loss(pairs: Pairs, options: Options) -> Result:
    """Return the losses of pairs: -log sigmoid(r_chosen - r_rejected - gamma), a reward r being beta times the mean
    log-probability of an answer's tokens (equations 4 to 6)."""
    chosen, rejected = (options.beta * mean for mean in pairs.means)
    losses = -logsigmoid(chosen - rejected - options.simpo_gamma)
    return Result(losses, figures_of(pairs, chosen, rejected))
