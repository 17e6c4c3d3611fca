"""Identity preference optimization (Azar et al. 2023, arXiv 2310.12036)."""

from .contract import Options, Pairs, Result, figures_of


def loss(pairs: Pairs, options: Options) -> Result:
    """Return the losses of pairs: (h - 1 / (2 beta))^2 (equation 17, where beta is called tau).

    h is the difference of the log-ratios of chosen and rejected, each a mean over the answer's tokens: sums, as the paper writes
    them, grow with the answers, and 1 / (2 beta) does not (TRL computes it so, as the paper's authors advised).
    """
    chosen, rejected = pairs.log_ratios
    chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    losses = (chosen - rejected - 1 / (2 * options.beta)) ** 2
    return Result(losses, figures_of(pairs, options.beta * chosen, options.beta * rejected))
