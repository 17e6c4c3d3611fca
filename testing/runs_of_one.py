"""Runs of one process: their losses, and how they break."""

import math

from transformers import TrainerCallback


class Ruin(TrainerCallback):
    """Makes one weight NaN after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            next(model.parameters()).data[0, 0] = math.nan


def left_alone(run):
    for leftover in ("success.json", "trainer_state.json", "model.safetensors"):
        (run / leftover).unlink()
