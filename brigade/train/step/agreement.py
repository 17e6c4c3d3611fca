"""Compare ranks that must hold the same values: before each checkpoint, at the end, and in between where it costs almost nothing.

Weights, optimizer states, counters and the place in the data are the same on all ranks that hold the same part of them, to the
bit: gradients have been averaged, and each rank adds them in the same way. A rank that differs has a faulty device or a fault in
its program. No average repairs it, and no loss shows it. So the run ends, and nothing from such a step is saved.

Not compared: what each rank has of its own (ZeRO's and FSDP2's shards, a share of the data), replicas of local training, which
meet in an average, and ranks on unlike devices, which round differently. A tensor group's ranks are compared by norms: each
rank computes the gradient of the shared parameters itself, and a GPU may add in any order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...errors import UserError, Whose
from ...errors.console import counted
from ..data.collate import ABOUT, MicroBatch
from ..distributed import heartbeat, ranks
from ..distributed.digests import Comparison, Difference, Held
from ..distributed.process import this_process
from ..engines.shares import OwnPart
from ..run import events, on_disk
from ..run.hooks import Feature
from .context import TrainingContext

if TYPE_CHECKING:
    from transformers import TrainerState


FIRST = 10  # steps before the first comparison that is timed, and before the next: the first one loads kernels
SHARE = 1000  # so many times what a comparison took are between two of them: it costs a thousandth


class Agreement(Feature):
    """Compares this rank with the others.

    checked: the last step that was compared; due: the next one, where no checkpoint comes before
    """

    def __init__(self, trainer: TrainingContext) -> None:
        self.trainer = trainer
        self.comparison = Comparison(ranks.gather, trainer.run.world.rank)
        self.device = _device()
        self.checked = self.due = -1
        self.since: tuple[int, float] | None = None  # step and time of the last comparison
        self.supervised: float | None = None

    def begin(self, checkpoint: object) -> None:
        self.due = self.trainer.state.global_step + FIRST

    def before_micro_batches(self, micro_batches: list[MicroBatch]) -> None:
        self.supervised = micro_batches[0][ABOUT].step_supervised

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step >= self.due:
            with this_process.heartbeat.within(heartbeat.MEASURING):
                self.check()

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step > self.checked:  # the model is saved without a checkpoint of its last step
            self.check()

    def check(self) -> None:
        """Compare all ranks as they are now. A collective. Raises UserError on all of them where any differs."""
        step, began = self.trainer.state.global_step, time.perf_counter()
        difference = self.comparison.compare([*self.held()])
        if difference:
            raise self._error(difference, step)
        now = time.perf_counter()
        steps, seconds = (step - self.since[0], now - self.since[1]) if self.since else (0, 0.0)
        # Whoever came last has waited for nobody, so that the least is what it takes.
        took, of_a_step = map(min, zip(*ranks.gather((now - began, seconds / max(steps, 1))), strict=True))
        wait = math.ceil(SHARE * took / of_a_step) if of_a_step else FIRST
        self.due, self.since, self.checked = step + max(1, wait), (step, now), step

    # ---- what is compared --------------------------------------------------------------------------------------------
    def held(self) -> Iterator[Held]:
        """Yield what this rank holds, and which part of the whole it is."""
        trainer, place = self.trainer, self.trainer.place
        in_groups = trainer.run.strategy.axes.tensor > 1
        yield from self._counters()
        for name, part, value in trainer.engine.held(trainer):
            if value.numel():
                yield Held(name, (part, place.tensor, self.device), value)
                if in_groups and not isinstance(part, OwnPart) and value.is_floating_point():
                    yield Held(name, (part, self.device), value, rounded=True)
        for name, part, value in trainer.engine.held_states(trainer):
            if value.numel():
                yield Held(name, (part, place.tensor, self.device), value)

    def _counters(self) -> Iterator[Held]:
        trainer, place, state = self.trainer, self.trainer.place, self.trainer.state
        yield Held("the step", (), state.global_step)
        yield Held("the place in the data", (), (state.epoch, self.supervised))
        yield Held("the learning rate", place.stage, trainer.lr_scheduler.get_last_lr())
        optimizer = trainer.engine.optimizer(trainer)
        for kept in (*optimizer.state.values(), *optimizer.param_groups):
            if "step" in kept:  # all count alike, and to look at one on a device takes time
                yield Held("the optimizer's count of steps", (), float(kept["step"]))
                break
        norm = trainer.nonfinite.norm
        if norm is not None:
            yield Held("the gradient norm", (place.tensor, self.device), f"{float(norm):.6g}")
        scale = trainer.engine.loss_scale(trainer)
        if scale:
            yield Held("the loss scale", (), scale["scale"])
        if trainer.run.strategy.axes.tensor > 1:  # the ranks of a group must drop the same
            states = [torch.get_rng_state()]
            states += [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
            for number, each in enumerate(states):
                yield Held("the state of random numbers", (number, place.stage, place.data, place.sequence), each)

    # ---- where something differs -------------------------------------------------------------------------------------
    def _error(self, found: Difference, step: int) -> UserError:
        """Return the error that ends the run."""
        trainer, run = self.trainer, self.trainer.run
        hosts = ranks.gather(trainer.run.world.host)
        odd = list(dict.fromkeys(hosts[rank] for rank in found.odd))
        who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in found.odd[:4])
        who += f" and {counted(len(found.odd) - 4, 'more rank')}" if len(found.odd) > 4 else ""
        said = {value: rank for rank, value in reversed([*zip(found.of, found.values, strict=True)]) if value}
        values = f" ({', '.join(f'{value} on rank {rank}' for value, rank in said.items())})" if said else ""
        what = f"{who} hold{'s' * (len(found.odd) == 1)} something else than most of {counted(len(found.of), 'rank')}"
        if not found.known:
            what = f"{who} no longer hold the same, and it is not known which of them is right"
        what += f": first {found.name}{values}"
        trainer.checkpoints.let_finish()
        kept = on_disk.whole_checkpoints(run.directory)
        newest = f"{kept[max(kept)].name} is the newest sound one" if kept else "there is no checkpoint from before"
        if trainer.run.world.is_main_rank:
            where = {"rank": found.odd[0], "host": odd[0]} if found.known else {}
            events.add(run.directory, "fault", kind="divergence", step=step, what=what, action="stop", **where)
        # A host is at fault where a majority says so, or where all in question are its own.
        whose: Whose = "host" if found.known or len(odd) == 1 else "run"
        cure = f"the same command {'continues from it' if kept else 'begins again'}, as launch --restarts does; "
        cure += f"look for a sick device on {' and '.join(odd[:4])} (`python -m brigade check`)"
        if found.known and len(set(hosts)) > 1:
            cure += f", or leave {odd[0]} out"
        problem = f"{what}; nothing of this step is saved, and {newest}"
        return UserError(f"step {step}", problem, cure, whose, tuple(odd) if whose == "host" else (), code=1)


def _device() -> str:
    """What rounding may depend on: the GPU's name, or instructions and threads of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
