"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): no decay of the learning rate, but an average of the weights.

    y = (1 - beta1) z + beta1 x       where gradients are computed: what the model has while it trains
    z' = z - rate (g / (sqrt(v) + eps) + weight_decay y)
    x' = (1 - c) x + c z'             the average: what is evaluated and saved

c is this step's share of the squared learning rates so far. As the rate is constant after its warm-up, c follows from the number
of steps, and only z, v and that number are kept. Everything is computed element by element, so each rank steps its own part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engines.engine import StepContext
from ..engines.muon import Group
from ..engines.shares import local_part
from ..run.hooks import Feature
from ..upstream import torch_optim

if TYPE_CHECKING:
    from transformers import TrainerState


Z, SQUARES, TRAINED = "z", "exp_avg_sq", "y"  # names of states


def share_of_step(step: int, warmup: int) -> float:
    """Return c of a step, from 1 on: its squared learning rate / the sum of all squared ones so far.

    warmup: steps in which the rate rises from 0, as constant_with_warmup does (transformers/optimization.py)
    """
    before = min(step, warmup)  # whose rates are 0, 1, 2, ... of `warmup`
    total = before * (before - 1) * (2 * before - 1) / 6 + max(0, step - warmup) * warmup**2 if warmup else step
    own = min(step - 1, warmup) ** 2 if warmup else 1
    return own / total if total else 0.0


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """While it trains, a parameter holds y; from rest() to go_on() it holds x, and the state TRAINED holds y.

    warmup: as in share_of_step(). All other arguments are AdamW's.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.warmup = warmup
        self.begun = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # torch and Accelerate hand None on
        for group in self.param_groups:
            after = defaultdict[int, list[Tensor]](list)  # so many steps
            for owner in group["params"]:
                if owner.grad is not None:
                    after[self._count(owner)].append(owner)
            for steps, owners in after.items():
                self._step(owners, steps, group)

    def _count(self, owner: Tensor) -> int:
        """Count a step of what the optimizer steps, and return the number."""
        state = self.state[owner]
        if not state:
            state["step"] = torch.tensor(0.0)
            state[Z] = owner.detach().clone(memory_format=torch.preserve_format)
            state[SQUARES] = torch.zeros_like(owner, memory_format=torch.preserve_format)
            if not self.begun:
                # Before it loads FSDP2's states, torch lets an optimizer make its own by a step of length 0
                # (distributed/checkpoint/state_dict.py), and loads no others than these.
                state[TRAINED] = torch.zeros_like(owner, memory_format=torch.preserve_format)
        if state["step"].device.type != "cpu":  # a checkpoint's: the host would wait for it in each step
            state["step"] = state["step"].cpu()
        state["step"] += 1
        return int(state["step"])

    def _step(self, owners: list[Tensor], steps: int, group: Group) -> None:
        zs, squares = ([local_part(self.state[owner][key]) for owner in owners] for key in (Z, SQUARES))
        gradients = [local_part(owner.grad).to(owner.dtype) for owner in owners if owner.grad is not None]
        torch_optim.step_schedule_free(
            [local_part(owner) for owner in owners],
            zs,
            squares,
            gradients,
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["lr"],
            steps,
            share_of_step(steps, self.warmup),
        )

    @torch.no_grad()
    def rest(self, keep: bool = True) -> None:
        """Let parameters hold the average. keep: whether go_on() follows, or a checkpoint is written"""
        for owner, state in self.state.items():
            if Z in state:
                if keep:
                    state[TRAINED] = owner.detach().clone(memory_format=torch.preserve_format)
                beta1 = self.defaults["betas"][0]
                local_part(owner).lerp_(local_part(state[Z]), 1 - 1 / beta1)

    @torch.no_grad()
    def go_on(self) -> None:
        """Let parameters hold again what they held before rest(), also where a checkpoint was written in between and loaded."""
        for owner, state in self.state.items():
            if TRAINED in state:
                local_part(owner).copy_(local_part(state.pop(TRAINED)))


class ScheduleFree(Feature):
    """Gives the model the average while it is evaluated or saved, and when training is over."""

    def __init__(self, trainer: StepContext) -> None:
        self.trainer = trainer
        self.over = False

    @property
    def _optimizer(self) -> ScheduleFreeAdamW:
        optimizer = self.trainer.engine.optimizer(self.trainer)
        found: ScheduleFreeAdamW = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        return found

    def begin(self, checkpoint: Path | None) -> None:
        self._optimizer.begun = True
        if checkpoint:
            self._switch(self._optimizer.go_on)

    def reloading(self) -> AbstractContextManager[None]:
        return self.at_rest()  # the states are then those that a checkpoint has

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        if self.over:
            yield
            return
        self._switch(self._optimizer.rest)
        yield  # after an error nothing goes on
        self._switch(self._optimizer.go_on)

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Behind Checkpoints', which may have loaded the best one: the average, too."""
        stopped = self.trainer.stopping.by  # the run goes on later, and saves no model now
        loads_best = self.trainer.run.settings.recipe.training.load_best_model_at_end and state.best_model_checkpoint
        if not stopped and not loads_best:
            self._switch(lambda: self._optimizer.rest(keep=False))
        self.over = True

    def _switch(self, change: Callable[[], None]) -> None:
        """Change what the optimizer steps, and let the model compute with it. A collective."""
        self.trainer.engine.shares(self.trainer)  # FSDP2 puts its parameters back in their place for it
        change()
        self.trainer.engine.spread_weights(self.trainer)
