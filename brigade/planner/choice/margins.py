"""What the formulas predict of a run beside what it measured: two figures, and one sentence where they differ."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..costs.hardware import Gpu
from ..costs.memory import GIB
from .estimate import estimate
from .job import Job

WAITING = 0.1  # of a step: the share of waiting for data from which on it is named as the reason


@dataclass(frozen=True)
class Prediction:
    """GiB that torch's allocator has allocated at most on the fullest rank, and seconds of a step, with their 80 % intervals.

    parts: GiB of what is allocated (costs/memory.py)
    """

    allocated_gib: float
    allocated_between: tuple[float, float]
    step_time: float
    step_time_between: tuple[float, float]
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """allocated_gib: None without a GPU, where nothing counts what is allocated; data_time: seconds of step_time in which the
    slowest rank waited for data; steps: at whose end this was measured, warm_up: how many of them step_time leaves out
    parts: GiB of the model's states on the fullest rank, and peak, of all that is allocated or, without a GPU, resident"""

    steps: int
    warm_up: int
    step_time: float
    data_time: float
    allocated_gib: float | None
    parts: dict[str, float] = field(default_factory=dict)


def predict(usual: Job, largest: Job, device: Gpu) -> Prediction:
    """Step time by the usual micro-batch, memory by the largest one."""
    time, memory = estimate(usual, device), estimate(largest, device)
    parts = {part.name: getattr(memory.memory, part.name) / GIB for part in fields(memory.memory)}
    return Prediction(memory.allocated_gib, memory.memory_interval(), time.time.total, time.time_interval(), parts)


def report(predicted: Prediction | None, measured: Measured, reason: str = "") -> list[str]:
    """The line after the tenth step, and a sentence on what lies outside its interval. reason: why nothing is predicted."""
    memory, step = measured.allocated_gib, f"{_seconds(measured.step_time)} s per step"
    figures = [] if memory is None else [f"{memory:.1f} GiB allocated at most"]
    head = f"after {measured.steps} steps: "
    if predicted is None:
        return [f"{head}{', '.join([*figures, step])}; the planner estimates nothing: {reason}"]
    if figures:
        low, high = predicted.allocated_between
        figures[0] += f" (estimated {predicted.allocated_gib:.1f}, 80 % interval {low:.1f} to {high:.1f})"
    expected, fast, slow = map(_seconds, (predicted.step_time, *predicted.step_time_between))
    step += f" (estimated {expected}, 80 % interval {fast} to {slow})"
    sentence = _outside(predicted, measured)
    return [f"{head}{', '.join([*figures, step])}", *([sentence] if sentence else [])]


def _outside(predicted: Prediction, measured: Measured) -> str:
    """One sentence on what lies outside of its interval, or ""."""
    memory, seconds = measured.allocated_gib, measured.step_time
    least, most = predicted.allocated_between
    fast, slow = predicted.step_time_between
    said = []
    if memory is not None and memory > most:
        said.append("it needs more memory than estimated, so plans for runs like it are too tight")
    elif memory is not None and memory < least:
        said.append("it needs less memory than estimated, so a larger micro-batch may fit")
    if seconds > slow and measured.data_time > WAITING * seconds:
        share = measured.data_time / seconds
        said.append(f"it waits for data during {share:.0%} of a step (more dataloader_num_workers help)")
    elif not fast <= seconds <= slow:
        said.append(
            f"it is {'slower' if seconds > slow else 'faster'} than estimated; if this cluster is always so, `python -m brigade "
            "plan --calibrate` with this run's directory teaches it to the planner"
        )
    text = ", and ".join(said)
    return text[:1].upper() + text[1:] + "." if text else ""


def _seconds(value: float) -> str:
    """Three digits at least: 2.31, 0.0412"""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def entry(predicted: Prediction | None, measured: Measured, device: Gpu | None, reason: str = "") -> dict[str, Any]:
    """The same for run.yaml, without the job."""
    found = {"measured": _short(asdict(measured))}
    if predicted is None or device is None:
        return {"none": reason} | found
    factors = {"efficiency": device.efficiency, "network": device.network}
    return {"gpu": device.kind, "predicted": _short(asdict(predicted)) | factors} | found


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """With five digits; pairs as lists."""

    def short(value: Any) -> Any:
        if isinstance(value, tuple):
            return [short(one) for one in value]
        if isinstance(value, dict):
            return _short(value)
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return {key: short(value) for key, value in values.items()}
