"""What a run says of the time that it took until its first step had ended."""

from dataclasses import asdict

from transformers import TrainerCallback, TrainerState

from ..distributed import timeline
from ..distributed.process import this_process
from .progress import Progress
from .report_events import ReportEvents


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
            self.report.lines.put(line | {"phases": list(map(_short, phases))})


def _short(phase: timeline.Phase) -> dict[str, object]:
    """A phase as its line has it: to a millisecond."""
    return asdict(phase) | {"began": round(phase.began, 3), "seconds": round(phase.seconds, 3)}
