"""Schedule-free AdamW: pytorch_optimizer's own, step by step; and the average, which a model has while it is at rest."""

import copy
import itertools

import pytest
import torch

from brigade.train.recipe.schedules import check_schedule
from brigade.train.step.schedule_free import TRAINED, ScheduleFreeAdamW, share_of_step

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8}


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape)) for shape in ((5, 3), (7,), (2, 2, 3))]


def learn(given, optimizer, steps, first=0, rate=None):
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        for parameter in given:
            parameter.grad = parameter.detach() * 0.3 + torch.randn_like(parameter)
        if rate:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.step()


@pytest.mark.parametrize("warmup", [0, 3])
def test_its_steps_are_those_of_pytorch_optimizer(warmup):
    from pytorch_optimizer import ScheduleFreeAdamW as Theirs

    ours, theirs = parameters(), parameters()
    optimizers = ScheduleFreeAdamW(ours, **OPTIONS, warmup=warmup), Theirs(theirs, **OPTIONS, foreach=False)
    for given, optimizer in zip((ours, theirs), optimizers, strict=True):
        learn(given, optimizer, 9, rate=lambda step: 1e-2 * min(1, step / warmup if warmup else 1))
    for at_rest in (False, True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-7), at_rest
        optimizers[0].rest()
        optimizers[1].eval()
    assert not torch.equal(ours[0], optimizers[0].state[ours[0]][TRAINED])


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_a_steps_share_is_that_of_its_squared_rate(warmup):
    rates = [min(1.0, step / warmup if warmup else 1.0) for step in range(12)]
    for step, total in enumerate(itertools.accumulate(rate**2 for rate in rates), 1):
        assert share_of_step(step, warmup) == pytest.approx(rates[step - 1] ** 2 / total if total else 0.0)


def test_with_equal_rates_the_average_is_the_mean_of_all_z():
    (parameter,) = given = parameters()[:1]
    optimizer, zs = ScheduleFreeAdamW(given, **OPTIONS), []
    for step in range(5):
        learn(given, optimizer, 1, step)
        zs.append(optimizer.state[parameter]["z"].clone())
    optimizer.rest()
    assert torch.allclose(parameter, torch.stack(zs).mean(0), atol=1e-6)


def test_resting_and_a_checkpoint_at_rest_change_no_bit_of_what_follows():
    straight, rested = parameters(), parameters()
    optimizer, other = ScheduleFreeAdamW(straight, **OPTIONS), ScheduleFreeAdamW(rested, **OPTIONS)
    optimizer.begun = other.begun = True
    learn(straight, optimizer, 6)
    learn(rested, other, 3)
    other.rest()
    saved, weights = copy.deepcopy(other.state_dict()), [each.detach().clone() for each in rested]
    other.go_on()
    learn(rested, other, 3, 3)
    again = [torch.nn.Parameter(each) for each in weights]
    loaded = ScheduleFreeAdamW(again, **OPTIONS)
    loaded.load_state_dict(saved)
    loaded.go_on()
    learn(again, loaded, 3, 3)
    for one, two, three in zip(straight, rested, again, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
        assert set(optimizer.state[one]) == set(loaded.state[three]) == {"step", "z", "exp_avg_sq"}


@pytest.mark.parametrize("keys, says", [
    ({"lr_scheduler_type": "cosine"}, "averages weights in the place of a schedule"),
    ({"lr_scheduler_type": "constant", "adam_beta1": 0}, "it is 0"),
])  # fmt: skip
def test_a_schedule_that_falls_is_refused(load, keys, says, user_error):
    assert says in user_error(load, training={"optim": "schedule_free_adamw", **keys}).problem
    warmup = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}
    settings = load(training={"optim": "schedule_free_adamw", **warmup})
    check_schedule(settings.recipe.training, settings.place)
