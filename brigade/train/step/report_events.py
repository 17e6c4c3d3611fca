"""What happens in a run, for whoever watches from outside: events.jsonl in its directory (run/events.py), and its page."""

import queue
import threading
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback, TrainerState

from ..distributed import timeline
from ..distributed.process import this_process
from ..run import events
from ..run.directory import Run, written
from .progress import Progress


class ReportEvents(TrainerCallback):
    """What the main rank reports: started, step (all figures, as often as the run logs) and evaluation. A thread writes: a slow
    file system costs the run nothing. At the end of training all of it is written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.writer: threading.Thread | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        run, step = self.run, state.global_step
        self.writer = threading.Thread(target=self._write, daemon=True)
        self.writer.start()
        line = {"event": "started", "step": step, "steps": state.max_steps, "strategy": run.strategy.name}
        line |= {"checkpoint": f"checkpoint-{step}" if step else None, "ranks": run.world.size * run.strategy.replicas}
        self.lines.put(line | {"hosts": written(run.directory)["run"]["hosts"]})

    def on_log(self, args: object, state: TrainerState, control: object, logs: dict[str, float], **_: object) -> None:
        if "loss" in logs:
            kept = {key: _short(value) for key, value in logs.items() if isinstance(value, int | float)}
            self.lines.put({"event": "step", "steps": state.max_steps, **kept, "step": state.global_step})

    def on_evaluate(
        self, args: object, state: TrainerState, control: object, metrics: dict[str, float], **_: object
    ) -> None:
        found = {key.removeprefix("eval_"): value for key, value in metrics.items() if key.startswith("eval_")}
        seconds = found.pop("runtime") + found.pop("answers_runtime", 0.0)
        line = {"event": "evaluation", "step": state.global_step, "seconds": seconds, **found}
        if self.writer:
            self.lines.put(line)
        else:  # after training
            events.add(self.run.directory, **line)

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        self.lines.put(None)
        if self.writer:
            self.writer.join(5)
            self.writer = None

    def _write(self) -> None:
        while line := self.lines.get():
            events.add(self.run.directory, **line)
            if self.run.settings.recipe.training.report_page and line["event"] == "evaluation" and line["step"]:
                self.run.pages.renew(self.run.directory)


def _short(value: float) -> float:
    """Round to six digits: a line stays a few hundred bytes long."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


class FirstStep(TrainerCallback):
    """Ends the timeline of this rank's run with the first step that it trains. The main rank prints and reports its own.

    On a GPU it is the host's time: what the host has handed to its GPU by then may still be computed.
    """

    def __init__(self, progress: Progress | None, report: ReportEvents | None) -> None:
        self.progress, self.report = progress, report

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if not this_process.timeline.end():
            return
        phases = this_process.timeline.phases
        if self.progress:
            self.progress.write(timeline.in_words(phases))
        if self.report:
            seconds = sum(phase.seconds for phase in phases)
            line = {"event": "first step", "step": state.global_step, "seconds": round(seconds, 3)}
            self.report.lines.put(line | {"phases": list(map(_rounded, phases))})


def _rounded(phase: timeline.Phase) -> dict[str, object]:
    """A phase as its line has it: to a millisecond."""
    return asdict(phase) | {"began": round(phase.began, 3), "seconds": round(phase.seconds, 3)}
