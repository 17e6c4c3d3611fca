"""Cal-DPO (Xiao et al. 2024, arXiv 2412.14516): DPO whose rewards are also drawn to +1/2 and -1/2 over beta."""

from torch.nn.functional import logsigmoid

from brigade.train.loss.objective.contract import Options, Pairs, Result, figures_of


def loss(pairs: Pairs, options: Options) -> Result:
    chosen, rejected = pairs.log_ratios
    target = 1 / (2 * options.beta)
    losses = -logsigmoid(chosen - rejected) + (chosen - target) ** 2 + (rejected + target) ** 2
    return Result(losses, figures_of(pairs, options.beta * chosen, options.beta * rejected))
