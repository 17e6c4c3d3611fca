"""A tensor group with a tiny model, tried out before training: what a plan leaves undivided may still work on a rank's own part.

Transformers' plans name matrices and some norms. A parameter that no plan names, and that a layer applies to its rank's own heads
or neurons (Apertus' xIELU, Phi's norms of queries and keys), gets a part of its gradient on each rank; one with a value for each
head does not even fit. Two threads of this process therefore play two ranks of a group, in float64, with plain tensors and sums
of their own, and are compared with the whole model.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ....errors import first_line
from ... import upstream
from ...model import trial
from ...model.location import load_config
from ...model.parts import takes_images
from ...recipe.settings import Settings
from .tensor_plan import NORMS, WEIGHTS, general, plan_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


RANKS = 2
PATIENCE = 120  # seconds that a rank waits for the other, so that nothing can hang
TOLERANCE = 1e-4  # relative to a gradient's norm, for models compute some norms in float32


def summed(config: PreTrainedConfig, trust_remote_code: bool = False) -> tuple[frozenset[str], str]:
    """Return (parameters outside the plan whose gradient is a sum over the group; why a group computes something else, or "").

    Names are those inside the decoder, with a star for each number (general()).
    """
    return _tried(trial.Architecture.of(config), trust_remote_code)


def summed_of(settings: Settings) -> frozenset[str]:
    """Return the first of summed() for a run's model, which its preflight has tried."""
    return summed(load_config(settings), settings.recipe.model.trust_remote_code)[0]


@lru_cache(maxsize=16)
def _tried(architecture: trial.Architecture, trust_remote_code: bool) -> tuple[frozenset[str], str]:
    with trial.alone(), torch.enable_grad():
        try:
            own = architecture.config
            # A decoder that is no language model by itself is tried with its tower, which stays whole.
            images = upstream.model_class(own.get_text_config()) is None and takes_images(own)
            own = own if images else own.get_text_config()
            # Grouped products of experts do not know float64.
            options = {"dtype": torch.float64, "experts_implementation": "eager"}
            model = trial.tiny_model(own, images, RANKS, trust_remote_code=trust_remote_code, **options)
            with torch.no_grad():
                for parameter in model.parameters():  # no zeros and ones: their gradients would hide some others
                    parameter.add_(0.05 * torch.randn_like(parameter))
            plan = plan_of(model, frozenset())
            plan = {name: style for name, style in plan.items() if _is_divided(model, name, style)}
            loss, whole = _gradients(model)
        except Exception as error:  # what cannot be tried is not trusted
            return frozenset(), f"a tiny model of it cannot be tried ({type(error).__name__}: {first_line(error)})"
        try:
            losses, parts = zip(*_in_a_group(model, plan), strict=True)
        except Exception as error:
            return frozenset(), f"a tiny model of it then fails ({type(error).__name__}: {first_line(error)})"
        if any(abs(other - loss) > TOLERANCE * abs(loss) for other in losses):
            return frozenset(), f"a tiny model of it then has a loss of {losses[0]:.6f} instead of {loss:.6f}"
        return _judge(model, plan, whole, parts)


def _is_divided(model: PreTrainedModel, name: str, style: str) -> bool:
    """Whether the trial divides a module: not both ends, nor embeddings in layers, which give the same divided or not.

    Raises TypeError for a layer that is not linear.
    """
    module = model.get_submodule(name)
    if module is model.get_output_embeddings() or isinstance(module, nn.Embedding):
        return False
    if style in WEIGHTS and not isinstance(module, nn.Linear):
        raise TypeError(f"{general(name)} is a {type(module).__name__}, and no linear layer")
    return True


def _gradients(model: torch.nn.Module) -> tuple[float, dict[str, Tensor | None]]:
    sequences = torch.arange(7, 23).view(2, 8)
    loss = model(input_ids=sequences, labels=sequences, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _judge(
    model: PreTrainedModel,
    plan: Mapping[str, str],
    whole: Mapping[str, Tensor | None],
    parts: tuple[Mapping[str, Tensor], ...],
) -> tuple[frozenset[str], str]:
    """Compare the gradients of each rank with those of the whole model. Returns what summed() returns."""
    prefix = next(f"{name}." for name, module in model.named_modules() if module is model.get_decoder())
    largest = max(gradient.norm() for gradient in whole.values() if gradient is not None)
    in_parts: dict[str, set[bool]] = {}  # for what no plan names, whether its gradient is a sum over ranks
    for name, gradient in whole.items():
        if gradient is None:
            continue
        of, _, key = name.rpartition(".")
        style, seen = plan.get(of, ""), in_parts.setdefault(general(name.removeprefix(prefix)), set())
        own = [torch.zeros_like(gradient) if part[name] is None else part[name] for part in parts]

        def same(other: Tensor, gradient: Tensor = gradient) -> bool:
            return bool((other - gradient).norm() <= TOLERANCE * gradient.norm() + 1e-9 * largest)

        if style in WEIGHTS and (WEIGHTS[style] == 0 or key == "weight"):
            alike = same(torch.cat(own, WEIGHTS[style]))
        elif style == NORMS:
            alike = same(torch.stack(own).sum(0))
        elif alike := all(map(same, own)):
            seen.add(False)
        elif alike := same(torch.stack(own).sum(0)):
            seen.add(True)
        if not alike:
            return frozenset(), f"the gradient of {general(name)} is none that ranks could put together"
    mixed = sorted(name for name, kinds in in_parts.items() if len(kinds) > 1)
    if mixed:
        return frozenset(), f"the gradient of {mixed[0]} is whole in some layers, and in parts in others"
    return frozenset(name for name, kinds in in_parts.items() if True in kinds), ""


# ---- a group of threads --------------------------------------------------------------------------------------------
class _Rank:
    """A rank of the group. number: its own"""

    def __init__(self, number: int, barrier: threading.Barrier, table: list[Tensor]) -> None:
        self.number, self._barrier, self._table = number, barrier, table

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        self._table[self.number] = tensor
        self._barrier.wait(PATIENCE)
        every = [*self._table]
        self._barrier.wait(PATIENCE)
        return every

    def leave(self) -> None:
        self._barrier.abort()


Function = Callable[[Tensor], Tensor]


class _Collective(torch.autograd.Function):
    """One function forward, and another backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, forward: Function, backward: Function) -> Tensor:
        ctx.way_back = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[Tensor, None, None]:
        return ctx.way_back(gradients[0]), None, None


def _in_a_group(model: torch.nn.Module, plan: Mapping[str, str]) -> list[tuple[float, dict[str, Tensor]]]:
    """Return loss and gradients of each rank. Raises what the first rank that fails raises."""
    table: list[Any] = [None] * RANKS
    barrier, results, errors = threading.Barrier(RANKS), [None] * RANKS, []
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)

    def work(rank: _Rank, part: torch.nn.Module) -> None:
        try:
            for name, style in plan.items():
                _divide(part.get_submodule(name), style, rank)
            results[rank.number] = _gradients(part)  # type: ignore[call-overload]
        except Exception as error:
            errors.append(error)
            rank.leave()

    parts = [copy.deepcopy(model) for _ in range(RANKS)]
    threads = [
        threading.Thread(target=work, args=(_Rank(number, barrier, table), part), daemon=True)
        for number, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results  # type: ignore[return-value]


def _divide(linear: torch.nn.Module, style: str, rank: _Rank) -> None:
    """Leave a linear layer only its rank's part, in place, and let it compute as its style says. Norms of heads stay whole."""
    side = WEIGHTS.get(style)
    if side is None:
        return

    def mine(tensor: Tensor, dimension: int = -1) -> Tensor:
        return tensor.chunk(RANKS, dimension)[rank.number]

    def total(tensor: Tensor) -> Tensor:
        return torch.stack(rank.exchange(tensor)).sum(0)

    def together(tensor: Tensor) -> Tensor:
        return torch.cat(rank.exchange(tensor), -1)

    def itself(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    def columns(hidden: Tensor) -> Tensor:
        part = nn.functional.linear(_Collective.apply(hidden, itself, total), linear.weight, linear.bias)
        return part if style == "colwise" else _Collective.apply(part, together, mine)

    def rows(hidden: Tensor) -> Tensor:
        part = hidden if style == "rowwise" else _Collective.apply(hidden, mine, together)
        whole = _Collective.apply(nn.functional.linear(part, linear.weight), total, itself)
        return whole if linear.bias is None else whole + linear.bias

    linear.weight = nn.Parameter(mine(linear.weight.detach(), side).clone())
    if linear.bias is not None and side == 0:
        linear.bias = nn.Parameter(mine(linear.bias.detach()).clone())
    linear.forward = columns if side == 0 else rows
