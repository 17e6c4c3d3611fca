"""Dynamic fine-tuning (Wu et al. 2025, arXiv 2508.05629): a token's loss counts by its probability, as in a policy gradient."""


def loss(losses, targets):
    return losses * (-losses.detach()).exp()
