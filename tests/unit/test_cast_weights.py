"""In bf16 over fp32 weights, a step casts each weight once: the same gradients bit for bit, and an evaluation sees no copy."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.train.engines.cast_weights import CastWeights

MICRO_BATCHES = 3


class Casts(TorchDispatchMode):
    """Counts casts of matrices of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        return function(*args, **(kwargs or {}))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 24))


def forward(of, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return of(batch).float().pow(2).mean()


def train(of, feature, steps=3):
    """Return losses of micro-batches and of evaluations, the last step's gradients, and how often the second matrix was cast."""
    optimizer, casts, losses = torch.optim.SGD(of.parameters(), lr=0.1), Casts((24, 24)), []
    batches = torch.randn(steps, MICRO_BATCHES, 5, 8, generator=torch.Generator().manual_seed(1))
    for step in batches:
        feature and feature.before_step()
        for batch in step:
            with casts:
                loss = forward(of, batch)
            loss.backward()
            losses.append(loss.item())
        feature and feature.on_pre_optimizer_step(None, None, None)
        gradients = [each.grad.clone() for each in of.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(forward(of, step[0]).item())
    return losses, gradients, casts.count


def test_a_step_casts_once_and_computes_the_same():
    plain, kept = train(model(), None), train(model(), CastWeights())
    assert kept[0] == plain[0] and all(map(torch.equal, kept[1], plain[1]))
    assert (plain[2], kept[2]) == (3 * MICRO_BATCHES, 3)


def test_a_step_that_fails_leaves_no_copy_behind():
    of, feature = model(), CastWeights()
    feature.before_step()
    forward(of, torch.ones(2, 8))
    feature.ended()
    with torch.no_grad():
        of[2].weight.zero_()
        assert forward(of, torch.ones(2, 8)) == of[2].bias.bfloat16().float().pow(2).mean()
    forward(of, torch.ones(2, 8)).backward()
    assert of[2].weight.grad is not None
