"""The figures of a page: the numbers that each shows, of one run or of several. charts.py draws them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors.tables import table
from ..train.distributed import timeline
from ..train.recipe.objectives import DISTILL, SFT
from ..train.run import events, typed
from .facts import Table
from .records import Entry, Record, attempts, events_of, number

SMOOTH = 100  # a curve of this many points or more gets a running mean, over a fiftieth of them
ENDS = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint", "between attempts")


@dataclass
class Line:
    """A curve. points: (step, tokens, seconds since the run began) for each value; None where that is not known.

    faint: the curve lies behind another that shows the same with less noise; low, high: a band around it
    """

    name: str
    points: list[tuple[int, float | None, float | None]]
    values: list[float]
    faint: bool = False
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def places(self, finite: bool) -> list[tuple[float, int]]:
        """(value, step) of the values that are finite, or of those that are not."""
        every = zip(self.values, self.points, strict=True)
        return [(value, step) for value, (step, *_) in every if math.isfinite(value) == finite]


@dataclass
class Bars:
    """A bar of parts that add up. parts: name -> length"""

    name: str
    parts: dict[str, float]


@dataclass
class Figure:
    """One figure. name: of its files; says: how to read it; lines or bars: what it shows; empty: why there is nothing to show"""

    name: str
    title: str
    unit: str
    says: str
    lines: list[Line] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    empty: str = ""

    @property
    def curves(self) -> list[Line]:
        """The lines without their running means."""
        return [line for line in self.lines if not line.name.endswith(MEAN)]

    @property
    def broken(self) -> list[str]:
        """A sentence for each curve with values that are not finite: how many, and where the first is."""
        of_lines = [(line.name, line.places(finite=False)) for line in self.curves]
        how = "values are NaN or infinite, the first at step"
        return [f"{name}: {len(places)} {how} {places[0][1]}" for name, places in of_lines if places]


MEAN = ", running mean"


def all_figures(records: list[Record]) -> list[Figure]:
    """Every figure, in the page's order. Each of several runs has a line; the data sources of a single run have one each."""
    return [
        _losses(records),
        _held_out(records),
        *_preferences(records),
        _curve(records, "gradient-norm", "Gradient norm", "", "grad_norm", "Before clipping, of each logged step."),
        _curve(records, "learning-rate", "Learning rate", "", "learning_rate", "As the schedule set it at each logged step."),
        _throughput(records),
        _curve(records, "step-time", "Time of a step", "seconds", "step_time", "Mean since the last log line, pauses left out."),
        *_starts(records),
        _times(records),
        *_profile(records),
        _memory(records),
        _curve(
            records, "peak-memory", "Peak memory", "GiB", "peak_memory_gib",
            "The most that any rank has had since its start: allocated on a GPU, or resident in a host's memory.",
        ),
        _curve(
            records, "slowest-rank", "Slowest rank's score", "", "slowest_rank_score",
            f"1: no rank keeps the others waiting. Below {events.SLOW} the log names the rank and its host.",
        ),
    ]  # fmt: skip


def _line(name: str, entries: Iterable[Entry], key: str) -> Line:
    line = Line(name, [], [])
    for entry in entries:
        value = number(entry.get(key))
        if value is not None:
            line.points.append((entry["step"], number(entry.get("tokens")), number(entry.get("seconds"))))
            line.values.append(value)
    return line


def _curve(records: list[Record], name: str, title: str, unit: str, key: str, says: str) -> Figure:
    lines = [_line(_named(records, record, title.lower()), record.steps, key) for record in records]
    return _with(Figure(name, title, unit, says), lines)


def _with(figure: Figure, lines: list[Line]) -> Figure:
    figure.lines = [line for line in lines if line.values]
    figure.empty = "" if figure.lines else "Nothing of it was logged."
    return figure


def _named(records: list[Record], record: Record, otherwise: str) -> str:
    return record.name if len(records) > 1 else otherwise


def _loss_of(records: list[Record], without: frozenset[str] = frozenset({SFT})) -> tuple[str, str]:
    """Return (what a loss is the mean of, its unit). without: objectives whose loss is the cross-entropy"""
    objectives = sorted({record.objective for record in records} - without)
    if objectives:
        return f"Mean of the objective's loss ({', '.join(objectives)}) over pairs or answers", ""
    return "Mean cross-entropy in nats per supervised token", "nats per token"


def _losses(records: list[Record]) -> Figure:
    what, unit = _loss_of(records)
    says = f"{what}, since the last log line."
    figure = Figure("training-loss", "Training loss", unit, says)
    lines = []
    for record in records:
        name = _named(records, record, "training")
        every = _line(name, record.steps, "loss")
        if len(every.values) >= SMOOTH:
            window = len(every.values) // 50
            figure.says = f"{says} The strong line is a running mean of a fiftieth of the run."
            mean = Line(name + MEAN, every.points, running_mean(every.values, window))
            every.faint = True
            lines += [every, mean]
        else:
            lines.append(every)
    return _with(figure, lines)


def sources(record: Record) -> list[str]:
    """The names of the held-out sources, where there are several."""
    keys = dict.fromkeys(key for entry in record.evaluations for key in entry)
    return [key.removesuffix("_loss") for key in keys if key.endswith("_loss") and key != "held_out_loss"]


def _held_out(records: list[Record]) -> Figure:
    what, unit = _loss_of(records, frozenset({SFT, DISTILL}))
    says = f"{what}, of samples that are never trained on, each used once."
    lines = []
    for record in records:
        lines.append(_line(_named(records, record, "all held-out samples"), record.evaluations, "loss"))
        for source in sources(record):
            name = f"{record.name}: {source}" if len(records) > 1 else source
            lines.append(_line(name, record.evaluations, f"{source}_loss"))
    return _with(Figure("held-out-loss", "Held-out loss", unit, says), lines)


PREFERENCES = table(Path(__file__).with_suffix(".yaml"))


def _preferences(records: list[Record]) -> Iterator[Figure]:
    """Yield the figures of objectives that compare answers, in training and held out; none where no run has them."""
    for key, about in PREFERENCES.items():
        lines = []
        for record in records:
            before = f"{record.name}: " if len(records) > 1 else ""
            lines += [
                _line(f"{before}training", record.steps, key),
                _line(f"{before}held out", record.evaluations, key),
            ]
        figure = _with(Figure(about["name"], about["title"], "", about["says"]), lines)
        if figure.lines:
            yield figure


def _throughput(records: list[Record]) -> Figure:
    says = "Tokens of a rank in a second, padding and pauses left out: the mean of all ranks."
    lines = []
    for record in records:
        line = _line(_named(records, record, "mean of all ranks"), record.steps, "tokens_per_second_per_gpu")
        entries = [entry for entry in record.steps if number(entry.get("tokens_per_second_per_gpu")) is not None]
        ends = [[number(entry.get(f"tokens_per_second_{end}")) for entry in entries] for end in ("least", "most")]
        if len(records) == 1 and any(value is not None for value in ends[0]):
            line.low, line.high = ([math.nan if value is None else value for value in end] for end in ends)
            says += " The band reaches from the rank with the fewest to the one with the most."
        lines.append(line)
    return _with(Figure("throughput", "Tokens per second and rank", "tokens/s", says), lines)


def _times(records: list[Record]) -> Figure:
    says = (
        "Seconds of the whole run. The parts of a step are the mean over all ranks, and include waiting for other ranks. On a "
        "GPU they are times of the host, which runs ahead of its GPU. Of evaluations and checkpoints, what training waited."
    )
    figure = Figure("time", "Where the time goes", "seconds", says)
    for record in records:
        parts = dict.fromkeys(ENDS, 0.0)
        before = 0
        for entry in record.steps:
            for part in ENDS[:4]:
                parts[part] += (number(entry.get(f"seconds_{part}")) or 0.0) * max(0, entry["step"] - before)
            before = entry["step"]
        parts["evaluation"] = _sum(number(entry.get("took")) for entry in record.evaluations)
        parts["checkpoint"] = _sum(number(line.get("blocked")) for line in events_of(record, "checkpoint"))
        parts["between attempts"] = _sum(attempt.idle for attempt in attempts(record))
        if any(parts[part] for part in ENDS[:4]):
            figure.bars.append(Bars(_named(records, record, "this run"), parts))
    figure.empty = "" if figure.bars else "The run has not recorded the parts of its steps."
    return figure


def _starts(records: list[Record]) -> Iterator[Figure]:
    """Yield the figure of what each start did before it trained, as step/report_events.py reports it; runs of earlier versions
    have none."""
    says = (
        "Seconds from the start of the main rank's process to the end of the first step that it trained, in order from left to "
        "right. Waiting for other ranks is in the phase in which it waited. On a GPU they are times of the host."
    )
    figure = Figure("start", "Until the first step", "seconds", says)
    for record in records:
        for attempt, line in enumerate(events_of(record, "first step"), 1):
            parts = timeline.parts([timeline.Phase(*map(phase.get, typed.PHASE)) for phase in line.get("phases", [])])
            figure.bars.append(Bars(f"{_named(records, record, 'start')} {attempt}", parts))
    if figure.bars:
        yield figure


def _profile(records: list[Record]) -> list[Figure]:
    """Return two figures where some rank was traced (train/watch/profile.py)."""
    traced = {
        (f"{record.name}, " if len(records) > 1 else "") + f"rank {line.get('rank', 0)}": line
        for record in records
        for line in events_of(record, "profile")
        if line.get("parts")
    }
    if not traced:
        return []
    on = "GPU" if all(line.get("device") for line in traced.values()) else "processor"
    says = f"Seconds of the traced steps: what a rank's {on} did. Each trace is in profile/, for ui.perfetto.dev."
    doing = Figure("profile", "Traced steps", "seconds", says)
    longest = Figure(
        "kernels", f"Longest {'kernels' if on == 'GPU' else 'operations'}", "seconds", "Over all calls of the same."
    )
    for figure, key in ((doing, "parts"), (longest, "kernels")):
        figure.bars = [Bars(name, line[key]) for name, line in traced.items() if line.get(key)]
    return [doing, longest]


def _sum(values: Iterable[float | None]) -> float:
    return math.fsum(value for value in values if value is not None and math.isfinite(value))


def _memory(records: list[Record]) -> Figure:
    says = "Of the fullest rank at its peak."
    figure = Figure("memory", "Memory by part", "GiB", says)
    for record in records:
        prediction = record.run.get("prediction", {})
        measured, predicted = (_parts(prediction.get(key)) for key in ("measured", "predicted"))
        before = f"{record.name}: " if len(records) > 1 else ""
        peak = measured.pop("peak", 0.0)
        rest = peak - sum(measured.values())
        if measured and rest > 0:
            measured["everything else"] = rest
        if measured:
            figure.bars.append(Bars(f"{before}measured", measured))
        if predicted:
            figure.bars.append(Bars(f"{before}planned", predicted))
        elif measured and prediction.get("none"):
            figure.says += f" {before}No estimate: {prediction['none']}."
    if any("everything else" in bar.parts for bar in figure.bars):
        figure.says += (
            " Measured are the model's states; everything else is what remains of the peak: activations, logits and buffers, and "
            "without a GPU the libraries, too."
        )
    figure.empty = "" if figure.bars else "It is measured in the first ten steps of a run."
    return figure


def _parts(section: object) -> dict[str, float]:
    parts = section.get("parts") if isinstance(section, dict) else None
    numbers = {str(key): number(value) for key, value in parts.items()} if isinstance(parts, dict) else {}
    return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}


# ---- as numbers --------------------------------------------------------------------------------------------------
def rows(figure: Figure) -> Table:
    """(head, rows) of everything that a figure shows, not thinned, for its CSV file."""
    if figure.bars:
        return ["of", "part", figure.unit], [[bar.name, *part] for bar in figure.bars for part in bar.parts.items()]
    band = any(line.low for line in figure.lines)
    head = ["line", "step", "tokens", "seconds", figure.title.lower(), *(["least", "most"] if band else [])]
    rows = []
    for line in figure.lines:
        for place, (point, value) in enumerate(zip(line.points, line.values, strict=True)):
            ends = [line.low[place], line.high[place]] if line.low else ["", ""] if band else []
            rows.append([line.name, *("" if part is None else part for part in point), value, *ends])
    return head, rows


def in_words(figure: Figure, show: Callable[[float], str]) -> str:
    """The figure in sentences, for readers who cannot see it. show: returns a value in words"""
    if figure.empty:
        return figure.empty
    if figure.bars:
        return " ".join(
            f"{bar.name}: {', '.join(f'{name} {show(value)}' for name, value in bar.parts.items())}."
            for bar in figure.bars
        )
    sentences = []
    for line in figure.curves:
        finite = line.places(finite=True)
        if finite:
            first, last, lowest, highest = (
                f"{show(value)} at step {step}" for value, step in (finite[0], finite[-1], min(finite), max(finite))
            )
            sentences.append(f"{line.name}: from {first} to {last}; lowest {lowest}, highest {highest}.")
    return " ".join(sentences)


def running_mean(values: list[float], window: int) -> list[float]:
    """The mean of the finite ones among the last `window` values up to each; NaN where there is none."""
    array: NDArray[np.float64] = np.asarray(values, dtype=float)
    finite = np.isfinite(array)
    sums, counts = np.cumsum(np.where(finite, array, 0.0)), np.cumsum(finite)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
