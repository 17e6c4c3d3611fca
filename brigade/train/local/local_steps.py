"""Replicas that train independently and average their weights every `sync_every` steps (docs/local-training.md).

Evaluations, checkpoints and a wish to stop wait for the next synchronisation; so all of them see the averaged model. The last
step is always one.

With `sync_fragments: P` (Streaming DiLoCo) each fragment of the layers has a step of its own among the `sync_every`. Its mean
change is on its way while OVERLAP further steps compute; then the fragment becomes half this replica's weights and half the
synchronised ones. Evaluations and checkpoints are of the synchronised weights.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import TrainerControl, TrainerState

from ...errors.console import counted
from ..checkpoint import manifest
from ..data.sampling import GlobalBatches
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines.engine import StepContext
from ..run.hooks import Feature
from .outer import Outer

OVERLAP = 5  # steps at most (arXiv 2501.18512, section 3.2: tau)
OWN_SHARE = 0.5  # alpha, there
WAITS = ("should_evaluate", "should_save", "should_training_stop")


class Replica(Feature):
    """What a Trainer asks of the replica that it trains. This is the only one of its run, in which each step is common to all
    ranks; LocalSteps is one of several.

    own: whether the checkpoint that it continues from is this replica's
    of_others: tokens that this rank's peers in other replicas have trained on
    """

    own = True
    of_others = 0

    def __init__(self, trainer: StepContext) -> None:
        self.trainer = trainer

    @property
    def speaks(self) -> bool:
        """Whether this replica saves and tells what all have in common."""
        return True

    @property
    def samples(self) -> int:
        """How many samples all replicas together have trained on."""
        return self.trainer.state.global_step * self.trainer.run.batch.global_size

    def batches(self) -> Callable[..., GlobalBatches]:
        """Return what makes its batches."""
        return GlobalBatches

    def epochs(self, asked: int) -> int:
        """Return how many epochs Transformers is to begin where the recipe asks for so many."""
        return asked

    def summary(self) -> dict[str, str]:
        """Return further lines of the run's summary."""
        return {}


class LocalSteps(Replica):
    """One of several replicas, on each of its ranks.

    local: this replica's own weights, while the model holds the synchronised ones
    sent: a fragment on its way to the other replicas: its number, the step at whose end it is mixed in, and its mean
    """

    def __init__(self, trainer: StepContext) -> None:
        super().__init__(trainer)
        training = trainer.run.settings.recipe.training
        self.peers, self.every = trainer.run.peers, training.sync_every or 1
        self.precision, self.fragments = training.sync_precision, training.sync_fragments
        self.loads_best = training.load_best_model_at_end
        self.overlap = min(OVERLAP, self.every // self.fragments)
        self.outer: Outer = None  # type: ignore[assignment]  # from begin() on
        self.waiting: set[str] = set()
        self.sender = ThreadPoolExecutor(1)
        self.sent: tuple[int, int, Future[Tensor]] | None = None
        self.met_at = 0
        self.local: list[Tensor] | None = None
        self.rounds = Rounds(self.every)
        self.told = 0  # tokens of this rank that its peers know of: up to the last synchronisation

    @property
    def speaks(self) -> bool:
        return self.trainer.run.world.replica == 0

    def place_in_run(self) -> dict[str, object]:
        return {"replica": self.trainer.run.world.replica}

    def begin(self, checkpoint: Path | None) -> None:
        """Compare the replicas' weights, and take what a checkpoint has. A collective. Raises RuntimeError where they differ."""
        self.outer = Outer(self.trainer)
        sums = self.peers.gather([float(last.double().sum()) for last in self.outer.last])
        if any(each != sums[0] for each in sums):
            raise RuntimeError("the replicas do not begin with the same weights")
        if checkpoint:
            wrote = manifest.recorded(checkpoint).get("replica", 0)
            self.own = wrote == self.peers.replica
            local = self.outer.load(checkpoint, self.own)
            if local:
                self._set(local)
            self._say_who_takes_another(wrote)

    def _say_who_takes_another(self, wrote: int) -> None:
        said = [
            f"replica {number} takes the optimizer states of replica {other}"
            for number, other in enumerate(self.peers.gather(wrote))
            if number != other
        ]
        if said and self.trainer.run.world.is_main_rank:
            tqdm.write(f"the checkpoint has no part of them: {', '.join(said)}; weights and outer states are whole")

    def summary(self) -> dict[str, str]:
        """{"replicas": "2 of 1 rank, synchronised every 50 steps (nesterov, rate 0.7, momentum 0.9) in fp32"}"""
        training, run = self.trainer.run.settings.recipe.training, self.trainer.run
        how: str = training.outer_optim
        if how == "nesterov":
            how += f", rate {training.outer_learning_rate:g}, momentum {training.outer_momentum:g}"
        parts = f", in {self.fragments} fragments" if self.fragments > 1 else ""
        who = f"{run.strategy.replicas} of {counted(run.world.size, 'rank')}"
        every = f"synchronised every {counted(self.every, 'step')} ({how}) in {self.precision}{parts}"
        return {"replicas": f"{who}, {every}; between two of them the log has the first one's loss and speed"}

    # ---- steps -----------------------------------------------------------------------------------------------------
    def on_step_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Send the fragment whose turn it is."""
        step = state.global_step
        if self.fragments == 1 or step == 0 or step + self.overlap > state.max_steps:
            return
        turn = next((n for n in range(self.fragments) if step % self.every == n * self.every // self.fragments), None)
        if turn is not None:
            mean = self.sender.submit(self.peers.mean, self.outer.change(turn), self.precision, background=True)
            self.sent = turn, step + self.overlap, mean

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        self.trainer.stopping.round = self.rounds.longest_after(time.monotonic())
        if self.sent and step == self.sent[1]:
            self._mix_in(self.sent[0], self.sent[2])
            self.sent = None
        if step % self.every and not last:
            for wish in WAITS:
                if getattr(control, wish):
                    self.waiting.add(wish)
                    setattr(control, wish, False)
            return
        if self.fragments == 1 or last:
            self._synchronise()
        self._agree(control)

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        whole = self.fragments == 1 or state.global_step >= state.max_steps
        if not (whole or self.trainer.stopping.by or self.loads_best):  # it was stopped early
            self._set(self.outer.last)  # what was evaluated, and is in the checkpoint

    def ended(self) -> None:
        self.sender.shutdown(wait=False)  # several runs may follow each other in one process

    def _synchronise(self) -> None:
        """All fragments at once."""
        for number in range(self.fragments):
            change = self.outer.change(number)
            with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
                mean = self.peers.mean(change, self.precision)
            self.outer.write(number, self.outer.step(number, mean))
        self.outer.spread()

    def _mix_in(self, number: int, sent: Future[Tensor]) -> None:
        with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
            mean = sent.result()
        new = self.outer.step(number, mean)
        self.outer.write(number, OWN_SHARE * self.outer.read(number) + (1 - OWN_SHARE) * new)
        self.outer.spread()

    def _agree(self, control: TrainerControl) -> None:
        """Let all replicas do now what any of them wishes."""
        stopping, self.met_at = self.trainer.stopping, self.trainer.state.global_step
        wishes = self.waiting | {wish for wish in WAITS if getattr(control, wish)}
        self.waiting = set()
        with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
            tokens = self.trainer.meter.tokens_ever - self.told
            said = self.peers.gather((sorted(wishes), stopping.by, stopping.number, tokens))
        heard = [(wishes, by, number) for wishes, by, number, _ in said if self._is_for_all(by, number, said)]
        for wish in wishes.union(*(theirs for theirs, *_ in heard)):
            setattr(control, wish, True)
        stopping.take(*next(((by, number) for _, by, number in heard if by), ("", 0)))
        self.of_others += sum(each for *_, each in said) - tokens
        self.told += tokens

    def _is_for_all(self, by: str, number: int, said: list[Any]) -> bool:
        """Whether what a replica wishes is the others' to do as well. by, number: of the stop that it was asked for, if any"""
        return True

    def add_figures(self, logs: dict[str, float], step: int) -> None:
        """Log the mean loss of all replicas and their speed together, in a step in which they met; between, the log keeps this
        one's. The others' tokens are counted up to the last synchronisation. A collective."""
        logs["tokens"] += sum(ranks.gather(self.of_others))
        if self.met_at == step:
            with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
                rows = self.peers.gather({key: logs[key] for key in ("loss", "tokens_per_second") if key in logs})
            logs["loss"] = sum(row["loss"] for row in rows) / len(rows)
            logs["tokens_per_second"] = sum(row["tokens_per_second"] for row in rows)

    # ---- evaluations and checkpoints ---------------------------------------------------------------------------------
    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Give the model its synchronised weights meanwhile. Without fragments it has them whenever it is at rest."""
        if self.fragments == 1 or self.outer is None:
            yield
            return
        self.local = local = [self.outer.read(number) for number in range(self.fragments)]
        self._set(self.outer.last)
        try:
            yield
        finally:
            self._set(local)
            self.local = None

    def _set(self, weights: list[Tensor]) -> None:
        for number, values in enumerate(weights):
            self.outer.write(number, values)
        self.outer.spread()

    def write(self, folder: Path) -> None:
        self.outer.save(folder, self.local)


class Rounds:
    """How long a round of `every` steps takes, its synchronisation, evaluations and checkpoints included."""

    def __init__(self, every: int) -> None:
        self.every, self.longest = every, 0.0
        self.recent: deque[float] = deque(maxlen=every)
        self.ended: float | None = None  # the last step

    def longest_after(self, now: float) -> float:
        """Seconds, at a step's end. In the first round the steps to come are taken to be as quick as the quickest so far."""
        if self.ended is not None:
            self.recent.append(now - self.ended)
            to_come = (self.every - len(self.recent)) * min(self.recent)
            self.longest = max(self.longest, sum(self.recent) + to_come)
        self.ended = now
        return self.longest
