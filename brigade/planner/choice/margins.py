"""What the formulas promise of a run, held against what it measured: two figures, and one sentence where they differ."""

from dataclasses import asdict, dataclass
from typing import Any

from ..costs.hardware import Gpu
from .estimate import estimate
from .job import Job

WAITING = 0.1  # of a step: the share of waiting for data from which on it is named as the reason


@dataclass(frozen=True)
class Figures:
    """GiB that torch's allocator had allocated at most on the fullest rank, and seconds of a step."""

    allocated_gib: float
    step_time: float


@dataclass(frozen=True)
class Promise:
    """figures: predicted; memory, time: GiB and seconds between which four of five runs lie"""

    figures: Figures
    memory: tuple[float, float]
    time: tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """allocated_gib: None without a GPU, where nothing counts what is allocated; data_time: seconds of step_time in which the
    slowest rank waited for data; steps: at whose end this was measured, warm_up: how many of them step_time leaves out"""

    steps: int
    warm_up: int
    step_time: float
    data_time: float
    allocated_gib: float | None


def promise(usual: Job, largest: Job, device: Gpu) -> Promise:
    """Step time by the usual micro-batch, memory by the largest one."""
    time, memory = estimate(usual, device), estimate(largest, device)
    return Promise(Figures(memory.allocated_gib, time.time.total), memory.memory_interval(), time.time_interval())


def told(promised: Promise | None, measured: Measured, reason: str = "") -> list[str]:
    """The line after the tenth step, and a sentence where a figure lies outside its interval. reason: why there is no promise."""
    memory, seconds = measured.allocated_gib, _seconds(measured.step_time)
    if promised is None:
        found = ([f"{memory:.1f} GiB allocated at most"] if memory is not None else []) + [f"{seconds} s per step"]
        return [f"after {measured.steps} steps: {', '.join(found)}; the planner promised nothing: {reason}"]
    low, high = promised.memory
    parts = []
    if memory is not None:
        parts.append(
            f"{memory:.1f} GiB allocated at most (the planner promised {promised.figures.allocated_gib:.1f}, and {low:.1f} to "
            f"{high:.1f} in four runs of five)"
        )
    expected, fast, slow = map(_seconds, (promised.figures.step_time, *promised.time))
    parts.append(f"{seconds} s per step (the planner promised {expected}, and {fast} to {slow} in four runs of five)")
    return [
        f"after {measured.steps} steps: {', '.join(parts)}",
        *([why] if (why := _meaning(promised, measured)) else []),
    ]


def _meaning(promised: Promise, measured: Measured) -> str:
    """One sentence on what lies outside of its interval, or ""."""
    memory, seconds = measured.allocated_gib, measured.step_time
    said = []
    if memory is not None and memory > promised.memory[1]:
        said.append("it needs more memory than four of five runs like it, so plans for it are too tight")
    elif memory is not None and memory < promised.memory[0]:
        said.append("it needs less memory than promised, so a larger micro-batch may fit")
    if seconds > promised.time[1] and measured.data_time > WAITING * seconds:
        said.append(
            f"it waits for data during {measured.data_time / seconds:.0%} of a step (more dataloader_num_workers help)"
        )
    elif not promised.time[0] <= seconds <= promised.time[1]:
        slower = "slower" if seconds > promised.time[1] else "faster"
        said.append(
            f"it is {slower} than four of five runs like it; if that is how this cluster is, `python -m brigade plan "
            "--calibrate` with this run's directory teaches it to the planner"
        )
    text = ", and ".join(said)
    return text[:1].upper() + text[1:] + "." if text else ""


def _seconds(value: float) -> str:
    """Three digits at least: 2.31, 0.0412"""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def entry(promised: Promise | None, measured: Measured, device: Gpu | None, reason: str = "") -> dict[str, Any]:
    """The same for run.yaml, without the job."""
    found: dict[str, Any] = {"measured": {key: _short(value) for key, value in asdict(measured).items()}}
    if promised is None or device is None:
        return {"none": reason} | found
    predicted = {
        "allocated_gib": _short(promised.figures.allocated_gib),
        "allocated_between": list(map(_short, promised.memory)),
        "step_time": _short(promised.figures.step_time),
        "step_time_between": list(map(_short, promised.time)),
        "efficiency": device.efficiency,
        "network": device.network,
    }
    return {"gpu": device.kind, "predicted": predicted} | found


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
