"""What ZeRO-3 keeps gathered: what DeepSpeed itself would keep, decided anew for each order of modules."""

import inspect
import random
from collections import defaultdict

import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as upstream

from brigade.train.upstream import zero_parameters
from brigade.train.upstream.zero_parameters import PREFIX

COORDINATOR = upstream.PartitionedParameterCoordinator
# DeepSpeed's own, without the cache in which it keeps decisions.
OWN = inspect.getclosurevars(vars(COORDINATOR)[PREFIX + "params_to_release"]).nonlocals["func"].__wrapped__


def modules(count, random_numbers):
    """Modules with up to three parameters each, of which one in four is persistent; some are shared, as tied weights are."""
    parameters, made = [], []
    for number in range(2 * count):
        parameter = torch.nn.Parameter(torch.empty(random_numbers.randint(1, 40)))
        parameter.ds_id, parameter.ds_numel, parameter.ds_persist = number, parameter.numel(), number % 4 == 0
        parameters.append(parameter)
    for number in range(count):
        module = torch.nn.Module()
        module.ds_id, module.ds_external_parameters = number, lambda: ()
        for place, parameter in enumerate(random_numbers.sample(parameters, random_numbers.randint(0, 3))):
            module.register_parameter(str(place), parameter)
        made.append(module)
    return made


def coordinator(order, distance, fetched):
    made = COORDINATOR.__new__(COORDINATOR)
    values = {
        "submodule_order": tuple(order),
        "max_reuse_dist_in_numel": distance,
        "trace_mode": upstream.ZeRoTraceMode.COMPLETE,
    }
    for name, value in (values | {"most_recent_step_id_param_fetched_for": fetched}).items():
        setattr(made, PREFIX + name, value)
    return made


@pytest.mark.parametrize("distance", [0, 1, 60, 400, 10**9])
def test_it_keeps_what_deepspeed_keeps(distance):
    random_numbers = random.Random(distance)
    for _ in range(20):
        forward = modules(12, random_numbers)
        order = forward + forward[::-1]
        fetched = defaultdict(lambda: -1)
        # The prefetcher skips these.
        fetched |= {each: random_numbers.randint(0, 30) for each in forward[3].parameters()}
        of = coordinator(order, distance, fetched)
        for step, module in enumerate(order, 1):
            assert zero_parameters._params_to_release(of, module, step) == OWN(of, module, step)


def test_it_decides_anew_once_modules_run_in_another_order():
    forward = modules(6, random.Random(1))
    of = coordinator(forward, 10**9, defaultdict(lambda: -1))
    first = [zero_parameters._params_to_release(of, module, step) for step, module in enumerate(forward, 1)]
    assert any(first)
    setattr(of, PREFIX + "submodule_order", tuple(forward + forward[::-1]))
    assert not any(zero_parameters._params_to_release(of, module, step) for step, module in enumerate(forward, 1))


def test_deepspeed_may_add_to_what_it_is_given():
    forward = modules(6, random.Random(1))
    of = coordinator(forward, 0, defaultdict(lambda: -1))
    first = zero_parameters._params_to_release(of, forward[0], 1)
    first.add(99)
    assert zero_parameters._params_to_release(of, forward[0], 1) == first - {99}
