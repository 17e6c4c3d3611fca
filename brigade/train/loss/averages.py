"""Figures of a loss that are logged as means over what was counted since the last entry, whichever ranks counted it."""

import math

import torch

from ..distributed import ranks
from ..run.hooks import Feature


class Averages(Feature):
    """Counts figures while a model learns, and logs their means.

    sums: name of a figure -> its sum, and how many values that is of, since the last log entry: (2,) in fp64
    sums_before: the same, before the current step
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.sums_before: dict[str, torch.Tensor] = {}

    def count(self, name: str, total: torch.Tensor, values: torch.Tensor) -> None:
        """Add to a figure's sum, and to how many values that is of: scalars."""
        own = torch.stack([total, values]).detach().double()
        self.sums[name] = self.sums[name] + own if name in self.sums else own

    def before_step(self) -> None:
        self.sums_before = dict(self.sums)

    def forget_step(self) -> None:
        self.sums = self.sums_before

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        own = dict(zip(self.sums, torch.stack([*self.sums.values()]).tolist(), strict=True)) if self.sums else {}
        of_ranks = ranks.gather(own)
        for name in dict.fromkeys(name for each in of_ranks for name in each):
            total, count = (
                math.fsum(column) for column in zip(*(each[name] for each in of_ranks if name in each), strict=True)
            )
            if count:
                logs[name] = total / count
        self.sums.clear()
