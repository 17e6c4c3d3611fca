"""A run that is asked to stop while it trains: all ranks agree at the end of a step, save a checkpoint and leave `stopped.json`.

Transformers' own enable_jit_checkpoint asks nobody: a signal to one rank crashes DDP and hangs ZeRO-3 there, and under DeepSpeed
the checkpoint is one step ahead of its trainer_state.json (transformers/trainer_jit_checkpoint.py).
"""

import math
import signal
import threading
import time

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..distributed import ranks, stop
from ..distributed.heartbeat import FORWARD
from ..distributed.observer import limit
from ..distributed.process import this_process
from ..run import directory as runs
from ..run import ending, events
from .throughput import Meter

MARGIN = 10.0  # seconds beyond two of the longest steps so far within which ranks agree; later than that some are gone
_RANKS = 2**20  # more than there are


class Stopping(TrainerCallback):
    """by: who asked, in words, once all ranks know of it
    longest: seconds between the ends of two steps, what came between them (an evaluation, a checkpoint) included
    round: likewise, between two synchronisations of replicas
    grace: seconds from the wish to the end of this run, by its own measure
    """

    def __init__(self, run: runs.Run, meter: Meter) -> None:
        self.run, self.meter, self.by, self.number = run, meter, "", 0
        self.longest = self.round = self.grace = 0.0
        self.every = run.settings.recipe.training.sync_every or 1
        self.ended: float | None = None  # the last step
        self.signals = this_process.signals
        self.signals.begin_run()

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        if not self.signals.trains:
            self.signals.begin_training(self.deadline)
            if self.run.world.local_rank == 0:  # hosts may each have a directory of their own
                threading.Thread(target=self._watch, daemon=True).start()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._measure(time.monotonic(), state.global_step)
        if self.by:  # the replicas stop together, when they meet
            return
        asked = self.signals.asked
        mine = 0 if asked is None else (1 + asked) * _RANKS + self.run.world.number
        wish = ranks.largest(mine)
        if wish:
            number, rank = wish // _RANKS - 1, wish % _RANKS
            several = self.run.world.size * self.run.strategy.replicas > 1
            to_one = several and number not in (0, signal.SIGINT)  # Ctrl-C reaches all of them
            self.take(stop.name(number) + (f" to rank {rank}" if to_one else ""), number)
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                once_more = "A second" if self.number else "A"
                # A multiple of 1: at once.
                step = min(-(-state.global_step // self.every) * self.every, state.max_steps)
                line = f"Stopping after step {step} ({self.by}): saving a checkpoint."
                tqdm.write(f"{line} {once_more} signal ends the run at once.")

    def take(self, by: str, number: int) -> None:
        """Stop, as `by` has asked: all ranks of this replica know of it, or another replica says so. number: the signal, 0 for
        the file"""
        if by and not self.by:
            self.by, self.number = by, number
            self.signals.agree()

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        if not self.by:
            self.signals.end_training()

    def deadline(self, asked: float, number: int) -> float:
        """Until when the ranks may agree on a stop that signal `number` asks for. An evaluation or a checkpoint that goes on may
        take as long as it likes, and a process without others waits for nobody.

        Who presses Ctrl-C sees what goes on, and can press it again: a step may then take as long as one that is no hang, for it
        may compile or be the first. Programs send other signals, and most of them kill 30 seconds later.
        """
        resumed = self.meter.resumed
        if resumed is None or self.run.world.size * self.run.strategy.replicas == 1:
            return math.inf
        usual = MARGIN + 2 * self.longest
        return max(asked, resumed) + (max(usual, limit(FORWARD)) if number == signal.SIGINT else usual)

    def _measure(self, now: float, step: int) -> None:
        """What a stop takes at most: a step and what follows it, another such step (of replicas, all until they meet), and a
        checkpoint to its last byte."""
        if self.ended:  # the first step compiles, for one
            self.longest = max(self.longest, now - self.ended)
        self.ended = now
        needs = MARGIN + 2 * self.longest + max(self.round, self.longest)
        if self.run.world.is_main_rank and needs > 1.2 * self.grace:
            saving = (events.slowest(self.run.directory, event) for event in ("checkpoint", "upload"))
            self.grace = needs + sum(saving)
            this_process.agent.note(grace=self.grace)
            events.add(self.run.directory, "grace", step=step, seconds=round(self.grace, 1))

    def leave(self, state: TrainerState) -> None:
        """Mark the run as stopped, after all ranks have written their parts of the checkpoint. A collective."""
        ending.leave(self.run, state.global_step, self.by)
        self.signals.finish(self.number)

    def _watch(self) -> None:
        """Look for the file now and then, beside the training: a file system that hangs must not keep that."""
        file = self.run.directory / stop.FILE
        while self.signals.waits_for_a_wish:
            if file.exists():
                self.signals.ask(0)
            time.sleep(1)
