"""One rank of benchmarks/bubble.py: runs of train.py whose pipeline's passes are timed, and stretched where a job says so.

Timed are the methods in which torch's schedules compute; waiting is outside of them.
"""

import contextlib
import io
import time
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

import train
from benchmarks.bubble_lines import Pass, work
from brigade.train.upstream.pipelining import Stage
from testing.runs import forget


class Lines(TrainerCallback):
    """steps: this rank's passes in each

    seconds: a stage's layer takes that long at least, forward, for gradients of inputs and for those of weights; 0: as it does
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps: list[list[Pass]] = []
        self.now: list[Pass] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.now)
        self.now = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        own = {name: Stage.__dict__.get(name) for name in ("forward_one_chunk", *BACKWARD)}
        for name in own:
            setattr(Stage, name, self._timed(name, getattr(Stage, name)))
        try:
            yield
        finally:
            for name, method in own.items():
                if method:
                    setattr(Stage, name, method)
                else:  # torch's
                    delattr(Stage, name)

    def _timed(self, name: str, method: Any) -> Any:
        def call(stage: Any, number: int, *args: Any, **options: Any) -> Any:
            kind = BACKWARD.get(name, "F")
            if kind == "B" and not options.get("full_backward", True):
                kind = "I"
            begin = time.monotonic()
            result = method(stage, number, *args, **options)
            least = begin + work(kind, stage.is_first) * layers(stage) * self.seconds
            time.sleep(max(0.0, least - time.monotonic()))
            self.now.append((stage.stage_index, kind, number, begin, time.monotonic()))
            return result

        return call


BACKWARD = {"backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


def layers(stage: Any) -> int:
    """How many layers a stage has; of the others there are empty places."""
    return sum(any(True for _ in layer.parameters()) for layer in stage.submod.part.layers)


def lines_of(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return this rank's layers, and its passes step by step, of each run. jobs: {"flags", "seconds"} of each"""
    found = []
    for job in jobs:
        lines = Lines(job["seconds"])
        with contextlib.redirect_stdout(io.StringIO()), lines.watching():
            trainer = train.main(job["flags"], callbacks=(lines,))
        counts = [layers(stage) for stage in trainer.engine.pipeline.stages]
        found.append({"layers": sum(counts), "steps": lines.steps})
        forget(trainer)
        del trainer
    return found
