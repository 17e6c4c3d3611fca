"""What replicas average: the weights that each rank owns, since they were last the same everywhere, and the outer optimizer.

Each rank sends what its engine keeps of the weights: its shard under ZeRO and FSDP2, and under DDP, where each has them all, an
equal part. So a replica sends the model once, whatever number of ranks it has. All of this lies in host memory, in fp32.

    change = last - now, its mean over replicas
    average:   last' = last - change                              (Local SGD, arXiv 1805.09767)
    nesterov:  m' = momentum m + change
               last' = last - rate (change + momentum m')         (DiLoCo, arXiv 2311.08105)
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors.tables import Document
from ..engines import shares
from ..engines.engine import StepContext
from ..upstream import unpickling

Range = tuple[str, int, int]  # a parameter's name, and elements start..stop of it, flattened
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


class Outer:
    """The outer optimizer of this rank.

    By fragment: last, the synchronised weights; momentum; ranges, whose values follow each other in these.
    """

    def __init__(self, trainer: StepContext) -> None:
        self.trainer, self.training = trainer, trainer.run.settings.recipe.training
        self.count = self.training.sync_fragments
        # Under DDP each rank of a replica has everything, and speaks for an equal part of it.
        self.parts = trainer.run.world.size if trainer.run.strategy.kind == "ddp" else 1
        self.part = trainer.run.world.rank if self.parts > 1 else 0
        self.ranges = [[range_ for range_, _ in self._owned(number)] for number in range(self.count)]
        self.last = [self.read(number) for number in range(self.count)]
        self.momentum = [torch.zeros_like(last) if self._nesterov else None for last in self.last]

    @property
    def _nesterov(self) -> bool:
        return self.training.outer_optim == "nesterov"

    # ---- weights -------------------------------------------------------------------------------------------------
    def _kept(self, number: int) -> Iterator[tuple[Range, Tensor]]:
        """Yield what this rank's engine keeps of a fragment: each range, and the memory in which it lies.

        It is asked again each time, because an engine may have loaded a checkpoint since.
        """
        # First, for FSDP2 may put its parameters back in their place for it.
        own = [*self.trainer.engine.shares(self.trainer)]
        names = {id(parameter): shares.name_of(name) for name, parameter in self.trainer.model.named_parameters()}
        for parameter, start, stop, owner, offset, _ in own:
            name = names[id(parameter)]
            if stop > start and fragment_of(name, self.count) == number:
                yield (name, start, stop), shares.flat(owner)[offset : offset + stop - start]

    def _owned(self, number: int) -> list[tuple[Range, Tensor]]:
        """Return what this rank speaks for of a fragment: all that it keeps, and under DDP its part."""
        kept = list(self._kept(number))
        size = -(-sum(flat.numel() for _, flat in kept) // self.parts)
        return cut(kept, self.part * size, (self.part + 1) * size)

    def read(self, number: int) -> Tensor:
        """This rank's weights of a fragment as they are now: flat, fp32, a copy in host memory."""
        return torch.cat([flat.float().cpu() for _, flat in self._owned(number)] or [torch.zeros(0)])

    def write(self, number: int, values: Tensor) -> None:
        """Set this rank's weights of a fragment. spread() has to follow. A collective of the replica."""
        for (_, flat), part in zip(self._owned(number), in_ranges(values, self.ranges[number]), strict=True):
            flat.copy_(part)
        if self.parts > 1:
            self._exchange(number)

    def _exchange(self, number: int) -> None:
        """Under DDP each rank has written its part: let all have all of it, with one parameter at a time in host memory."""
        own = {name: (start, flat) for (name, start, _), flat in self._owned(number)}
        for (name, *_), whole in self._kept(number):
            summed = torch.zeros(whole.numel())  # each value is one rank's, and 0 on all others
            if name in own:
                start, flat = own[name]
                summed[start : start + flat.numel()] = flat.float().cpu()
            dist.all_reduce(summed)
            whole.copy_(summed)

    def spread(self) -> None:
        """Let the model compute with what was written. A collective of the replica."""
        self.trainer.engine.spread_weights(self.trainer)

    # ---- the outer step ------------------------------------------------------------------------------------------
    def change(self, number: int) -> Tensor:
        """Return what the inner steps have changed since the last synchronisation, with a gradient's sign."""
        return self.last[number] - self.read(number)

    def step(self, number: int, mean_change: Tensor) -> Tensor:
        """Make an outer step, and return the weights that are the same everywhere from here on."""
        update, momentum = mean_change, self.momentum[number]
        if momentum is not None:
            momentum.mul_(self.training.outer_momentum).add_(mean_change)
            update = self.training.outer_learning_rate * (mean_change + self.training.outer_momentum * momentum)
        self.last[number] = self.last[number] - update
        return self.last[number]

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def save(self, folder: Path, local: list[Tensor] | None) -> None:
        """Write this rank's part of what a checkpoint must have besides the averaged weights.

        local: this replica's own weights, where they are not the averaged ones
        """
        kept = {"ranges": self.ranges, "momentum": self.momentum, "local": local}
        torch.save(kept, folder / f"local_steps_{self.trainer.run.world.rank}.pt")

    def load(self, folder: Path, with_local: bool) -> list[Tensor] | None:
        """Take the momentum from a checkpoint of any number of replicas and ranks; return this replica's own weights, where
        they were not the averaged ones, or None. with_local: the checkpoint is this replica's own"""
        files = sorted(folder.glob("local_steps_*.pt"))
        saved = [unpickling.load(file, map_location="cpu") for file in files]
        if not saved:
            return None
        if self._nesterov and all(momentum is not None for each in saved for momentum in each["momentum"]):
            self.momentum = list(self._assemble(saved, "momentum"))
        if with_local and all(each["local"] is not None for each in saved):
            return list(self._assemble(saved, "local"))
        return None

    def _assemble(self, saved: list[Document], key: str) -> Iterator[Tensor]:
        """This rank's values, whatever part of them each file has."""
        pieces: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        for file in saved:
            for ranges, values in zip(file["ranges"], file[key], strict=True):
                for (name, first, _), piece in zip(ranges, in_ranges(values, ranges), strict=True):
                    pieces[name].append((first, piece))
        for ranges in self.ranges:
            found = torch.zeros(sum(stop - start for _, start, stop in ranges))
            for (name, start, stop), values in zip(ranges, in_ranges(found, ranges), strict=True):
                for first, piece in pieces[name]:
                    low, high = max(start, first), min(stop, first + len(piece))
                    if low < high:
                        values[low - start : high - start] = piece[low - first : high - first]
            yield found


def fragment_of(name: str, fragments: int) -> int:
    """Which fragment a parameter belongs to: layers in turn, so that all fragments are about as large and as deep (the strided
    pattern of arXiv 2501.18512); what stands before the layers is in the first one, what stands after them in the last."""
    layer = _LAYER.search(name)
    if layer:
        return int(layer[1]) % fragments
    return 0 if "embed" in name or "wte" in name else fragments - 1


def in_ranges(values: Tensor, ranges: list[Range]) -> tuple[Tensor, ...]:
    """Return what belongs to each range of values that follow each other. Copies nothing."""
    return values.split([stop - start for _, start, stop in ranges])


def cut(kept: list[tuple[Range, Tensor]], first: int, end: int) -> list[tuple[Range, Tensor]]:
    """Return the values first..end of ranges that follow each other, with the memory of each. Copies nothing."""
    ranges, at = [], 0
    for (name, start, stop), flat in kept:
        low, high = max(first - at, 0), min(end - at, stop - start)
        if low < high:
            ranges.append(((name, start + low, start + high), flat[low:high]))
        at += stop - start
    return ranges
