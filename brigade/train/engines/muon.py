"""Muon (Keller Jordan; arXiv 2502.16982) for the matrices of a model and AdamW for all else, in one optimizer for every strategy.

One rank, the owner, computes the update of a whole matrix, by torch's own functions. Ranks with other parts or copies of it send
what the owner lacks and receive their parts of the result, both in bfloat16, in which Newton-Schulz computes anyway. So each
strategy gives what torch.optim.Muon gives in one process. Everything else is done on each rank's part, element by element.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import upstream
from ..distributed import ranks
from ..upstream.torch_optim import ADJUSTMENTS, adjusted_rate, orthogonalised
from .matrix_rounds import Matrix, Range, divide, rounds
from .shares import Share, flat

Group = dict[str, Any]  # of parameters, as torch's optimizers have them
MATRIX = "use_muon"  # in a group, where Muon steps it


class Muon(torch.optim.Optimizer):
    """Muon for the groups with use_muon, and torch's AdamW for the others.

    lr, weight_decay: of both; betas, eps: AdamW's; the others: as torch.optim.Muon's
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = ADJUSTMENTS[0],
    ) -> None:
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)], lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True
        )
        own = {MATRIX: False, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(params, self._adamw.defaults | own | {"adjust_lr_fn": adjust_lr_fn})
        self._exchange: _Exchange | None = None

    def divide_matrices(self, model: nn.Module, shares: Iterable[Share], device: torch.device) -> None:
        """Settle which rank owns which matrix. A collective, once the engine has wrapped the model and this optimizer.

        shares: of this rank (Engine.shares); device: where it computes and sends
        """
        self._exchange = _Exchange(model, shares, device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # torch and Accelerate hand None on
        self._adamw.param_groups = [group for group in self.param_groups if not group[MATRIX]]
        self._adamw.state = self.state
        self._adamw.step()
        # ZeRO-3 steps one of its groups after another, and empties the others meanwhile.
        group_of = {id(owner): group for group in self.param_groups if group[MATRIX] for owner in group["params"]}
        for group in self.param_groups:
            for owner in group["params"] if group[MATRIX] else ():
                if "momentum_buffer" not in self.state[owner]:
                    self.state[owner]["momentum_buffer"] = torch.zeros_like(owner, memory_format=torch.preserve_format)
        if self._exchange is None:
            # Before it loads FSDP2's states, torch lets an optimizer make its own by a step of length 0
            # (distributed/checkpoint/state_dict.py).
            if any(group["lr"] for group in self.param_groups):
                raise RuntimeError("Muon steps once divide_matrices() has been called")
        elif group_of:
            for matrices in self._exchange.rounds_of(frozenset(group_of)):
                self._round(self._exchange, matrices, group_of)

    def _round(self, exchange: "_Exchange", matrices: Sequence[Matrix], group_of: dict[int, Group]) -> None:
        """Step some matrices: each rank steps its parts of them."""
        updates = dict[tuple[Matrix, Range], Tensor]()
        for matrix in matrices:
            for part, owner, offset in exchange.parts[matrix]:
                updates[matrix, part] = self._momentum(owner, slice(offset, offset + part[1] - part[0]), group_of)
        for (matrix, part), update in exchange.orthogonalise(matrices, updates, self.defaults["ns_steps"]).items():
            owner, offset = exchange.place[matrix, part]
            if owner.grad is None:
                continue
            group, values = group_of[id(owner)], flat(owner)[offset : offset + part[1] - part[0]]
            rate = adjusted_rate(group["lr"], group["adjust_lr_fn"], matrix.rows, matrix.columns)
            values.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(values.device), alpha=-rate)

    def _momentum(self, owner: Tensor, part: slice, group_of: dict[int, Group]) -> Tensor:
        """Take a part's gradient into its momentum, and return what is orthogonalised, in bfloat16."""
        group, state = group_of[id(owner)], self.state[owner]
        if owner.grad is None:
            return flat(owner)[part].to(torch.bfloat16).zero_()
        gradient, momentum = flat(owner.grad)[part], flat(state["momentum_buffer"])[part]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


class _Exchange:
    """Who holds what of the matrices, and their way to the owners and back.

    parts: matrix -> (range, tensor that the optimizer steps, offset in it) of this rank's parts; place: of each part
    """

    def __init__(self, model: nn.Module, shares: Iterable[Share], device: torch.device) -> None:
        shapes, parameters = matrices_of(model), dict(model.named_parameters())
        number_of = {id(parameters[name]): number for number, name in enumerate(shapes)}
        held: list[list[tuple[int, int, Tensor, int]]] = [[] for _ in shapes]
        for parameter, start, stop, owner, offset, _ in shares:
            number = number_of.get(id(parameter))
            if number is not None:
                held[number].append((start, stop, owner, offset))
        told = ranks.gather([[[start, stop] for start, stop, _, _ in ranges if start < stop] for ranges in held])
        self.device, self.rank, self.ranks = device, dist.get_rank() if dist.is_initialized() else 0, len(told)
        self._matrices = divide(list(shapes.values()), told)
        self.parts: dict[Matrix, list[tuple[Range, Tensor, int]]] = {}
        # the tensor with which a matrix is stepped, even where this rank has none of it
        self._owners = dict[Matrix, int]()
        for matrix in self._matrices:
            self.parts[matrix] = found = []
            for start, stop, owner, offset in held[matrix.parameter]:
                self._owners[matrix] = id(owner)
                first, last = max(start, matrix.start), min(stop, matrix.start + matrix.size)
                if first < last:
                    found.append(((first - matrix.start, last - matrix.start), owner, offset + first - start))
        parts = ((matrix, part) for matrix, parts in self.parts.items() for part in parts)
        self.place = {(matrix, part): (owner, offset) for matrix, (part, owner, offset) in parts}
        self._rounds = dict[frozenset[int], list[list[Matrix]]]()

    def rounds_of(self, stepped: frozenset[int]) -> list[list[Matrix]]:
        """Return the rounds of what one call steps. stepped: ids of the tensors that it steps on this rank"""
        if stepped not in self._rounds:
            # A rank that has nothing of a matrix takes part where others step it. Only ZeRO-1 and 2 have such, in one call.
            matrices = [matrix for matrix in self._matrices if self._owners.get(matrix) in {None, *stepped}]
            self._rounds[stepped] = rounds(matrices, self.ranks)
        return self._rounds[stepped]

    def orthogonalise(
        self, matrices: Sequence[Matrix], updates: dict[tuple[Matrix, Range], Tensor], steps: int
    ) -> dict[tuple[Matrix, Range], Tensor]:
        """Return, for each of this rank's parts, its part of the whole matrix's orthogonalised update. A collective."""
        own = [matrix for matrix in matrices if matrix.owner == self.rank]
        wholes = {matrix: torch.empty(matrix.size, dtype=torch.bfloat16, device=self.device) for matrix in own}
        ways = [(matrix, part, matrix.source(who), matrix.owner) for matrix in matrices for part, who in matrix.held]
        for (matrix, (first, last)), values in self._send(ways, updates).items():
            wholes[matrix][first:last] = values
        results = {
            matrix: orthogonalised(whole.view(matrix.rows, matrix.columns), steps).reshape(-1)
            for matrix, whole in wholes.items()
        }
        parts = {(matrix, part): results[matrix][slice(*part)] for matrix in own for part, _ in matrix.held}
        ways = [(matrix, part, matrix.owner, rank) for matrix in matrices for part, who in matrix.held for rank in who]
        return self._send(ways, parts)

    def _send(
        self, ways: list[tuple[Matrix, Range, int, int]], having: dict[tuple[Matrix, Range], Tensor]
    ) -> dict[tuple[Matrix, Range], Tensor]:
        """Return what reaches this rank. ways: (matrix, range, sender, receiver), the same on all ranks"""
        mine = [(matrix, part) for matrix, part, sender, receiver in ways if sender == receiver == self.rank]
        found = {key: having[key] for key in mine}
        if all(sender == receiver for _, _, sender, receiver in ways):
            return found
        sent, received = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
        for matrix, part, sender, receiver in ways:
            if sender == self.rank != receiver:
                sent[receiver].append((matrix, part))
            elif receiver == self.rank != sender:
                received[sender].append((matrix, part))
        sizes_in = [sum(last - first for _, (first, last) in received[rank]) for rank in range(self.ranks)]
        sizes_out = [sum(last - first for _, (first, last) in sent[rank]) for rank in range(self.ranks)]
        pieces = [having[key].to(self.device) for rank in range(self.ranks) for key in sent[rank]]
        empty = torch.empty(0, dtype=torch.bfloat16, device=self.device)
        into = torch.empty(sum(sizes_in), dtype=torch.bfloat16, device=self.device)
        # As bytes: gloo sends no bfloat16 here.
        dist.all_to_all_single(
            into.view(torch.uint8), torch.cat([empty, *pieces]).view(torch.uint8),
            [2 * size for size in sizes_in], [2 * size for size in sizes_out],
        )  # fmt: skip
        at = 0
        for rank in range(self.ranks):
            for matrix, (first, last) in received[rank]:
                found[matrix, (first, last)] = into[at : at + last - first]
                at += last - first
        return found


def matrices_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters that Muon steps: matrices of layers, and fused experts, which are a matrix for each.

    AdamW keeps embeddings, the head, vectors, convolutions and whatever is no layer's `weight`.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [output, getattr(model, "score", None)]
    heads += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = {id(parameter) for head in heads if head is not None for parameter in head.parameters()}
    found = dict[str, tuple[int, ...]]()
    experts = {path for path, module in model.named_modules() if upstream.are_experts(module)}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        is_matrix = (len(shape) == 2 and last == "weight") or (len(shape) == 3 and path in experts)
        if is_matrix and min(shape[-2:]) > 1 and parameter.requires_grad and id(parameter) not in others:
            found[name] = shape
    return found
