"""Which samples a replica of an elastic run sees: its share of each step, and at the end the shares that were missed.

A share is what one replica takes of one step's samples, written (step, replica). A replica that is away misses its own; further
steps after the last one make up for it, on whichever replicas are there then.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from ...errors.tables import Document, Fields
from .sampling import FILLER, GlobalBatches, Indices

Share = tuple[int, int]


class Shares:
    """Who takes which share, in a run of so many steps and replicas. Every replica keeps the same, for all know who met.

    at: the step of the last meeting; begun: steps whose shares had been given out by then, at most `steps`
    due: shares that were missed by then and are still to be trained on; missed: how many ever were
    """

    def __init__(self, steps: int, replicas: int) -> None:
        self.steps, self.replicas = steps, replicas
        self.at = self.begun = self.missed = 0
        self.due: list[Share] = []

    @property
    def end(self) -> int:
        """The step after which nothing is left, as far as is known now."""
        return self.at + self.steps - self.begun + math.ceil(len(self.due) / self.replicas)

    @property
    def behind(self) -> float:
        """How many steps of all replicas the run is behind its number of steps, in samples trained on."""
        return self.at - self.begun + len(self.due) / self.replicas

    def share(self, step: int, replica: int) -> Share | None:
        """Return what a replica takes in a step since the last meeting (steps count from 0); None: nothing."""
        number = self.begun + step - self.at
        if number < self.steps:
            return number, replica
        place = (number - self.steps) * self.replicas + replica
        return self.due[place] if place < len(self.due) else None

    def meet(self, step: int, there: Collection[int]) -> None:
        """Note a meeting after so many steps of the run, of the replicas that have trained since the last one."""
        away = [replica for replica in range(self.replicas) if replica not in there]
        shares = [self.share(each, who) for each in range(self.at, step) for who in away]
        lost = [share for share in shares if share is not None]
        number = self.begun + step - self.at
        self.due = self.due[max(0, number - self.steps) * self.replicas :] + lost
        self.at, self.begun, self.missed = step, min(number, self.steps), self.missed + len(lost)

    def state(self) -> Fields:
        return {key: getattr(self, key) for key in ("steps", "replicas", "at", "begun", "missed", "due")}

    def load(self, state: Document) -> None:
        """Take over what state() returned, in a run that may have had another length."""
        self.at, self.begun, self.missed = state["at"], state["begun"], state["missed"]
        self.due = [(step, replica) for step, replica in state["due"]]


class MovingBatches(GlobalBatches):
    """GlobalBatches that begin at the run's step, and go on from one epoch to the next by themselves.

    step: returns how many steps the run has made when this rank takes its first batch; shares: who takes what
    """

    def __init__(self, *shape: Any, step: Callable[[], int], shares: Shares) -> None:
        super().__init__(*shape)
        self.step, self.shares, self.next = step, shares, -1
        self.known: tuple[int, np.ndarray] = (-1, np.zeros(0))  # an epoch, and its order

    def __iter__(self) -> Iterator[Indices]:
        self.next = self.step() if self.next < 0 else self.next
        for _ in range(self.steps):
            step = self.of_step(self.next)
            supervised = self._of_all(step)
            self.next += 1
            for micro_batch in step[:, self.rank]:
                yield Indices(micro_batch.tolist(), supervised)

    def of_step(self, step: int) -> np.ndarray:
        shares = (self.shares.share(step, replica) for replica in range(self.shares.replicas))
        return np.concatenate([self._samples(share) for share in shares], axis=1)

    def _samples(self, share: Share | None) -> np.ndarray:
        """Return the samples of a share; shape (accumulation, ranks of a replica, micro)."""
        ranks = self.world_size // self.shares.replicas
        if share is None:
            return np.full((self.accumulation, ranks, self.micro), FILLER)
        (epoch, number), first = divmod(share[0], self.steps), share[1] * ranks
        if epoch != self.known[0]:
            super().set_epoch(epoch)
            self.known = epoch, self.order()
        return self.known[1][number, :, first : first + ranks]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the step tells the epoch."""
