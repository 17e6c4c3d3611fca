"""After the tenth step: what the planner predicts of this run, and what was measured. One line, and an entry in run.yaml."""

import time
from typing import Any

import torch
from transformers import TrainerCallback

from ...train.loop.measured_states import OneStep
from ...train.loop.throughput import STEPS, WARM_UP, Meter
from ...train.run.directory import Run
from .measured_steps import measure
from .prediction import compare


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
            self.states = OneStep(args, state, control, **given)
        elif self.states:
            self.bytes, self.states = self.states.end(args, state, control), None
        if self.steps == WARM_UP:
            self.began = self._training_time()
        elif self.steps == STEPS:
            measured = measure(self.meter, (self._training_time() - self.began) / (STEPS - WARM_UP), self.bytes)
            if self.run.world.is_main_rank:
                compare(self.run, self.config, self.trained, measured)

    def _training_time(self) -> float:
        """Seconds, pauses left out, when the device has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.meter.paused_ever
