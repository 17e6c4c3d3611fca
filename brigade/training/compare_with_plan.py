"""After the tenth step: what the planner predicts of this run, and what was measured. One line, and an entry in run.yaml."""

import time
from typing import Any

import torch
from transformers import TrainerCallback

from ..distributed import ranks
from ..run.directory import Run
from .throughput import STATES, STEPS, WARM_UP, Meter


class CompareWithPlan(TrainerCallback):
    """Counts the steps of this process, resumed or not. On every rank, for its figures are the slowest and fullest one's.

    config: the model's; trained: parameters with gradients
    """

    def __init__(self, run: Run, meter: Meter, config: Any, trained: int) -> None:
        self.run, self.meter, self.config, self.trained = run, meter, config, trained
        self.steps, self.began = 0, 0.0
        self.states: Any = None  # measured_states.OneStep, of one step within the warm-up
        self.bytes = (0, 0, 0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.states:
            self.states.on_substep_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps += 1
        if self.steps == WARM_UP - 2 and "model" in given:
            from .measured_states import OneStep

            self.states = OneStep(args, state, control, **given)
        elif self.states:
            self.bytes, self.states = self.states.end(args, state, control), None
        if self.steps == WARM_UP:
            self.began = self._training_time()
        elif self.steps == STEPS:
            measured = self._measured((self._training_time() - self.began) / (STEPS - WARM_UP))
            if self.run.world.is_main_rank:
                from .planned import compare  # the planner is loaded now, and not before

                compare(self.run, self.config, self.trained, measured)

    def _training_time(self) -> float:
        """Seconds, pauses left out, when the device has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.meter.paused_ever

    def _measured(self, seconds: float) -> dict[str, float]:
        """The largest figures of any rank, of steps that took so many seconds. A collective."""
        usual = [about for abouts, _ in self.meter.first[WARM_UP:] for about in abouts]
        every = [about for abouts, _ in self.meter.first for about in abouts]
        waited = sum(waited for _, waited in self.meter.first[WARM_UP:]) / (STEPS - WARM_UP)
        self.meter.first, self.meter.first_steps = [], 0  # done with
        slots, tokens = sum(about.slots for about in usual), max(1, sum(about.tokens for about in usual))
        row = {
            "tokens": slots / len(usual),
            "attended": sum(about.squared_lengths for about in usual) / tokens,
            "labelled": sum(about.logits for about in usual) / slots,
            "row": sum(about.slots * about.row for about in usual) / slots,
            "largest": max(about.slots for about in every),
            "most_labelled": max(about.logits for about in every),
            "seconds": seconds,
            "waited": waited,
            "allocated": self.meter.training_peak_gib(),
            **{name: size / 2**30 for name, size in zip(STATES, self.bytes, strict=True)},
        }
        of_ranks = ranks.gather(row)
        return {key: max(other[key] for other in of_ranks) for key in row}
