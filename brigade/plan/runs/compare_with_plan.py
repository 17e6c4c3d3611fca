"""Measure the first ten steps of a run, and compare them with the plan: one line, and an entry in run.yaml."""

import time
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from ...train.distributed import ranks
from ...train.run.directory import Run
from ...train.watch.measured_states import OneStep
from ...train.watch.throughput import STATES, STEPS, WARM_UP, Meter
from .prediction import compare

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, TrainerControl, TrainerState, TrainingArguments


class CompareWithPlan(TrainerCallback):
    """Count the steps of this process, resumed or not, and measure them. It runs on every rank, for the slowest and fullest rank
    decides.

    config: the model's; trained: parameters with gradients
    """

    def __init__(self, run: Run, meter: Meter, config: "PreTrainedConfig", trained: int) -> None:
        self.run, self.meter, self.config, self.trained = run, meter, config, trained
        self.steps, self.began = 0, 0.0
        self.states: OneStep | None = None  # of one step within the warm-up
        self.bytes = (0, 0, 0)

    def on_substep_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: object
    ) -> None:
        if self.states:
            self.states.on_substep_end(args, state, control)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **given: object
    ) -> None:
        self.steps += 1
        if self.steps == WARM_UP - 2 and "model" in given:
            self.states = OneStep(args, state, control, **given)
        elif self.states:
            self.bytes, self.states = self.states.end(args, state, control), None
        if self.steps == WARM_UP:
            self.began = self._training_time()
        elif self.steps == STEPS:
            measured = largest_of_ranks(
                self.meter, (self._training_time() - self.began) / (STEPS - WARM_UP), self.bytes
            )
            if self.run.world.is_main_rank:
                compare(self.run, self.config, self.trained, measured)

    def _training_time(self) -> float:
        """Return the seconds without pauses, when the device has done what it was given."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.meter.paused_ever


def largest_of_ranks(meter: Meter, seconds: float, states: tuple[int, ...]) -> dict[str, float]:
    """Return the largest figures of any rank, for steps that took so many seconds each. A collective.

    states: bytes of STATES on this rank
    """
    usual = [about for abouts, _ in meter.first[WARM_UP:] for about in abouts]
    every = [about for abouts, _ in meter.first for about in abouts]
    waited = sum(waited for _, waited in meter.first[WARM_UP:]) / (STEPS - WARM_UP)
    meter.first, meter.first_steps = [], 0  # done with
    slots, tokens = sum(about.slots for about in usual), max(1, sum(about.tokens for about in usual))
    row = {
        "tokens": slots / len(usual),
        "attended": sum(about.squared_lengths for about in usual) / tokens,
        "labelled": sum(about.logits for about in usual) / slots,
        "length": sum(about.slots * about.length for about in usual) / slots,
        "largest": max(about.slots for about in every),
        "most_labelled": max(about.logits for about in every),
        "seconds": seconds,
        "waited": waited,
        "allocated": meter.training_peak_gib(),
        **{name: size / 2**30 for name, size in zip(STATES, states, strict=True)},
    }
    of_ranks = ranks.gather(row)
    return {key: max(other[key] for other in of_ranks) for key in row}
