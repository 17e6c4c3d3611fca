"""LocalSteps of an elastic run, whose replicas come and go (docs/local-training.md#replicas-that-come-and-go).

A replica joins at the beginning of a round. It takes over weights, optimizer states and its place in the run from a replica that
trains. When a replica is lost, its own steps since the last synchronisation are lost. The samples of its share, until it is back,
are trained on at the end, in further steps. The learning rate depends on how many samples have been trained on, not on steps.
"""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerControl, TrainerState, TrainingArguments

from ...errors.console import counted
from ...errors.tables import Document
from .. import upstream
from ..checkpoint import manifest
from ..data.moving_batches import MovingBatches, Shares
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..run import events
from . import hand_over
from .local_steps import LocalSteps, Replica
from .outer import Outer


def replica_of(trainer: StepContext) -> Replica:
    """Return the replica that this trainer trains: the only one, one of several that end together, or one that comes and goes."""
    if trainer.run.strategy.replicas == 1:
        return Replica(trainer)
    return ElasticSteps(trainer) if trainer.run.world.replicas > 1 else LocalSteps(trainer)


class ElasticSteps(LocalSteps):
    """A replica that may join the others, and leave them."""

    def __init__(self, trainer: StepContext) -> None:
        super().__init__(trainer)
        self.joined_at = -1  # step
        self.there: list[int] = []  # at the last synchronisation
        self.shares = Shares(0, trainer.run.world.replicas)  # from begin() on of the run's steps
        trainer.args.ignore_data_skip = True  # MovingBatches begin where the run is
        trainer.args.dataloader_num_workers = 0  # they would ask for batches before it is known who takes them

    @property
    def speaks(self) -> bool:
        return self.peers.speaks

    def batches(self) -> Callable[..., MovingBatches]:
        return partial(MovingBatches, step=lambda: self.trainer.state.global_step, shares=self.shares)

    def epochs(self, asked: int) -> int:
        """Return more than are asked for: missed shares are trained on after the last."""
        self.epochs_asked = asked
        return sys.maxsize

    @property
    def samples(self) -> int:
        return round((self.trainer.state.global_step - self.shares.behind) * self.trainer.run.batch.global_size)

    def place_in_run(self) -> dict[str, object]:
        return super().place_in_run() | {"shares": self.shares.state()}

    @property
    def missed(self) -> int:
        """Samples that were missed so far."""
        return self._samples(self.shares.missed)

    def _samples(self, shares: int) -> int:
        return shares * self.trainer.run.batch.global_size // self.shares.replicas

    # ---- joining ---------------------------------------------------------------------------------------------------
    def begin(self, checkpoint: Path | None) -> None:
        """Wait until the others take this replica in: at the start of the run all at once, later at the beginning of a round."""
        state = self.trainer.state
        self.outer = Outer(self.trainer)
        self.shares.steps = state.max_steps
        schedule = self.trainer.lr_scheduler
        schedule.lr_lambdas = [partial(self._rate, curve) for curve in schedule.lr_lambdas]
        if checkpoint:
            self.outer.load(checkpoint, with_local=False)
            self._take_shares(manifest.recorded(checkpoint).get("shares"))
        sums = [float(last.double().sum()) for last in self.outer.last]
        with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
            came = self.peers.join({"step": state.global_step, "sums": sums})
            within = [each for each in self.peers.members if each not in came]
            furthest = max(each["step"] for each in came.values())
            first = [number for number, each in came.items() if each["step"] == furthest]
            if not within and any(came[number]["sums"] != came[first[0]]["sums"] for number in first):
                raise RuntimeError("the replicas do not begin with the same weights")
            source = (within or first)[0]
            behind = [each for each in came if within or each not in first]
            if behind:
                self.peers.connect()
                self._hand_over(source, behind)
        if state.global_step:
            self.trainer.args.eval_on_start = False
            state.max_steps = self.shares.end
            upstream.take_rates_of(schedule)
        state.num_train_epochs = self.epochs_asked
        self.joined_at, self.there = state.global_step, list(self.peers.members)

    def _rate(self, curve: Callable[[float], float], step: int) -> float:
        """Return a schedule's value at a step: it goes by what has been trained on."""
        return curve(step - self.shares.behind)

    def _take_shares(self, saved: Document | None) -> None:
        """Take the shares of a checkpoint, unless its run had another number of replicas: their shares are none of these."""
        step = self.trainer.state.global_step
        if saved and saved["replicas"] == self.shares.replicas:
            self.shares.load(saved)
        else:
            self.shares.at = self.shares.begun = step
            if saved and saved["due"] and self.trainer.run.world.rank == 0:
                tqdm.write(
                    f"{len(saved['due'])} missed shares were those of {saved['replicas']} replicas: nobody trains on them"
                )

    def _hand_over(self, source: int, to: list[int]) -> None:
        if self.peers.replica == source:
            own = self.trainer.meter.tokens_ever + self.of_others
            tokens = self.trainer.meter.tokens_before + sum(ranks.gather(own))
            data = hand_over.pack(self.trainer, self.outer, {"tokens": tokens, "shares": self.shares.state()})
            for each in to:
                self.peers.send(each, data)
        elif self.peers.replica in to:
            data = self.peers.receive(source)
            counts = hand_over.unpack(self.trainer, self.outer, data, f"replica {source}")
            self.trainer.meter.tokens_before = counts["tokens"]
            self.shares.load(counts["shares"])

    def on_step_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Let in the replicas that wait, at the beginning of a round."""
        if state.global_step % self.every or state.global_step == self.joined_at:
            return
        with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
            came = self.peers.admit()
            if not came:
                return
            try:  # who comes may be lost again before it is there
                self.peers.connect()
                self._hand_over(next(each for each in self.peers.members if each not in came), came)
            except RuntimeError:
                self.peers.built = []
                return
        self._tell("joins", came, "it takes over weights, optimizer states and place from the others")

    # ---- rounds ----------------------------------------------------------------------------------------------------
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        before, met, ended = self.there, self.met_at, state.global_step >= state.max_steps
        super().on_step_end(args, state, control)
        if self.met_at == state.global_step != met:
            self.there = list(self.peers.members)
            steps, missed = state.global_step - self.shares.at, self.shares.missed
            self.shares.meet(state.global_step, self.there)
            if self.shares.missed > missed:
                upstream.take_rates_of(self.trainer.lr_scheduler)
            state.max_steps = self.shares.end
            if ended and state.global_step < state.max_steps and not self.trainer.stopping.by:
                control.should_training_stop = False  # its last round was not everybody's
            lost = [replica for replica in before if replica not in self.there]
            if lost:
                self._tell("lost", lost, f"the others go on without its last {counted(steps, 'step')}")
        state.epoch = self.samples / max(1, len(self.trainer.data.train))

    def _is_for_all(self, by: str, number: int, said: list[Any]) -> bool:
        """A launch that ends what is left of its replica sends SIGTERM only to that. A user asks all, or by Ctrl-C or
        the file `stop`."""
        asked = sum(1 for _, each, *_ in said if each)
        return not by or number in (0, signal.SIGINT) or 2 * asked > len(said)

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        finished = state.global_step >= state.max_steps or not self.trainer.stopping.by
        if self.missed and self.speaks and self.trainer.run.world.rank == 0:
            whole, due = self._samples(self.shares.steps * self.shares.replicas), self._samples(len(self.shares.due))
            left = f"; {due:,} of them are still to be trained on" if due else ""
            tqdm.write(
                f"{self.missed:,} of {whole:,} samples were missed by replicas that were away, for which the run has "
                f"{counted(state.max_steps - self.shares.steps, 'further step')}{left}"
            )
        self.peers.leave(finished)

    def _tell(self, event: str, which: list[int], what: str) -> None:
        if self.trainer.run.world.rank:
            return
        step, there = self.trainer.state.global_step, len(self.peers.members)
        words = "joins" if event == "joins" else "is lost"
        for each in which:
            figures = {"replica": each, "step": step, "there": there, "missed": self.missed}
            events.add(self.trainer.run.directory, f"replica_{event}", **figures)
            if self.speaks:
                now = f"{there} of {counted(self.trainer.run.world.replicas, 'replica')}, {self.missed:,} samples missed so far"
                tqdm.write(f"replica {each} {words} after step {step}: {what}; now {now}")
