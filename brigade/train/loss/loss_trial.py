"""Try a user's own loss before a model is built: does it treat each pair, or each token, separately?

A micro-batch holds whatever packing, accumulation and the number of ranks put into it. What a loss makes of an item must not
depend on the items next to it, on their order, on chance, or on earlier calls.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import first_line

SINGLES = 128  # as many items are tried by themselves: a state may change what comes out only after many calls
PARTS = [*range(2, 9), 64, 200]  # items of the micro-batches that are tried

# name -> (items,); returns what messages call it -> (items,), the losses first
Function = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class _Breaks(Exception):
    """Says in which way a function is not a loss of single items."""


def why_not(
    load: Callable[[], Function], items: Mapping[str, Tensor], item: str, passed: tuple[type[Exception], ...] = ()
) -> str:
    """Return in which way a loss fails to treat each item separately, or "" where it does not fail.

    load: returns the loss as it is before its first call; item: what an item is called
    items: plausible ones, more than a micro-batch has; those that require gradients get them in a run
    passed: errors of the loss that are raised as they are; others break the contract
    """
    functions = load(), load()
    try:
        with _seeded(1), torch.enable_grad():
            before = _states()
            _try(functions, items, item, passed)
            if _states() != before:
                return "it draws random numbers, or seeds them"
    except _Breaks as found:
        return str(found)
    return ""


def _try(
    functions: tuple[Function, Function], items: Mapping[str, Tensor], item: str, passed: tuple[type[Exception], ...]
) -> None:
    function, again = functions
    everything = torch.arange(len(next(iter(items.values()))))
    singles = everything[:: -(-len(everything) // SINGLES)].split(1)
    mixed = everything[torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))]

    def made(numbers: Tensor, function: Function = function) -> Tensor:
        """Return the losses of these items, and the gradients of their sum by each input: (1 + inputs, items)"""
        given = {name: values[numbers].detach().clone() for name, values in items.items()}
        leaves = [given[name].requires_grad_() for name, values in items.items() if values.requires_grad]
        losses = _called(function, given, item, passed)
        if not torch.is_grad_enabled():
            return losses[None]
        if not losses.requires_grad:
            raise _Breaks("its losses have no gradient")
        return torch.stack([losses, *torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)]).detach()

    first = made(everything)
    infinite = (~first.isfinite()).any(0).nonzero()
    if len(infinite):
        place = int(infinite[0])
        known = ", ".join(f"{name} {float(values[place]):.4g}" for name, values in items.items())
        raise _Breaks(
            f"of {known} it makes {float(first[0, place]):.4g}, and a gradient of {first[1:, place].tolist()}"
        )

    def same(numbers: Tensor, function: Function = function) -> bool:
        found = made(numbers, function)
        return _close(found, first[: len(found), numbers], first[: len(found)])

    with _seeded(2):
        alike = same(everything)
    parts = everything[: sum(PARTS)].split(PARTS)
    apart = alike and not all(map(same, (mixed, *parts, *singles[:32])))
    if alike and not apart:
        with torch.no_grad():  # as in an evaluation
            apart = not all(map(same, singles))
    if not (alike and same(everything)):
        raise _Breaks(
            f"of the same {item}s it makes something else the next time: it draws random numbers, or keeps a state"
        )
    made(singles[-1], again)
    if not apart and not same(everything, again):
        raise _Breaks(f"what it makes of a {item} depends on the {item}s of its first call: it keeps a state")
    if apart:
        raise _Breaks(f"what it makes of a {item} depends on the {item}s beside it")


def _called(function: Function, given: dict[str, Tensor], item: str, passed: tuple[type[Exception], ...]) -> Tensor:
    """Return the losses of items, in fp64. Raises _Breaks for a result that is not a number for each item."""
    count = len(next(iter(given.values())))
    those = f"{count} {item}{'s' * (count > 1)}"
    handed = {name: values.clone() for name, values in given.items()}  # as in a run, no leaves of the graph
    try:
        results = function(dict(handed))
        shapes = {name: tuple(values.shape) for name, values in results.items()}
    except passed:
        raise
    except Exception as error:
        raise _Breaks(f"tried with {those}, it raises {type(error).__name__}: {first_line(error)}") from None
    other = next((name for name, shape in shapes.items() if shape != (count,)), None)
    if other:
        raise _Breaks(f"of {those}, {other} has the shape {shapes[other]}")
    for name, values in handed.items():
        if not torch.equal(values, given[name]):
            raise _Breaks(f"it changes {name} in place")
    losses = next(iter(results.values()))
    return losses.double() if losses.dtype.is_floating_point else losses


def _close(found: Tensor, expected: Tensor, every: Tensor) -> bool:
    """Whether these, (rows, items) each, differ only by rounding in fp32. every: of all items, for differences of large ones"""
    allowed = 1e-5 * expected.abs() + 1e-7 * every.abs().amax(1, keepdim=True)
    return bool(((found - expected).abs() <= allowed).all())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Use other random numbers for a while."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _states() -> list[object]:
    """Return the state of each source of random numbers."""
    numpy: Any = np.random.get_state()
    return [random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()]
