"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), and losses of the same form."""

from torch.nn.functional import logsigmoid, relu

from .contract import Options, Pairs, Result, figures_of


def loss(pairs: Pairs, options: Options) -> Result:
    """Return the losses of pairs.

    sigmoid: -log sigmoid(beta h), h being the difference of the log-ratios of chosen and rejected (equation 7); with
        label_smoothing e: conservative DPO, (1 - e) and e of both orders (https://ericmitchell.ai/cdpo.pdf, equation 3)
    robust: the same without the bias that wrong labels give (Chowdhury et al. 2024, arXiv 2403.00409, equation 9)
    hinge: relu(1 - beta h) (SLiC on log-ratios: hinge-norm of Liu et al. 2023, arXiv 2309.06657, section 3)
    apo_zero, apo_down: the better answer's log-ratio is raised, or lowered less (D'Oosterlinck et al. 2024, arXiv 2408.06266)
    """
    beta, wrong = options.beta, options.label_smoothing
    chosen, rejected = (beta * ratio for ratio in pairs.log_ratios)
    margin = chosen - rejected
    match options.loss_type:
        case "hinge":
            losses = relu(1 - margin)
        case "robust":
            losses = (-(1 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)
        case "apo_zero":
            losses = 1 - chosen.sigmoid() + rejected.sigmoid()
        case "apo_down":
            losses = chosen.sigmoid() + 1 - margin.sigmoid()
        case _:
            losses = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    return Result(losses, figures_of(pairs, chosen, rejected))
