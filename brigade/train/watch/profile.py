"""Trace some steps of some ranks with torch.profiler, and say what the device did in them.

A trace is for https://ui.perfetto.dev or chrome://tracing. An event, which the page shows, says it in short: the kernels that
took longest, how long the device only sent and received, and how long it did nothing. Without a GPU it says the same of the
operations on this rank's processors.
"""

from __future__ import annotations

import gzip
import heapq
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..run import events
from ..run.directory import Run
from ..run.hooks import Feature
from ..upstream import memory_snapshots

if TYPE_CHECKING:
    from transformers import TrainerState


FOLDER = "profile"
LARGEST = 5
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of Kineto's traces
_GLOO = "gloo:"  # the beginning of its annotations, on threads of its own
_SENDS = ("nccl", "rccl", _GLOO, "c10d::")
_NAME = 80  # characters of a kernel's name: those of templates have hundreds
Interval = tuple[float, float]
_log = logging.getLogger(__name__)


class ProfileSteps(Feature):
    """Traces `steps` steps from the `start`-th of this process on: a run that continues warms up as long as a new one."""

    def __init__(self, run: Run, start: int, steps: int) -> None:
        self.run, self.start, self.steps = run, start, steps
        self.begun = 0
        self.profiler: Any = None

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        self.begun += 1
        if self.begun == self.start:
            activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & torch.profiler.supported_activities()
            self.profiler = profile(activities=activities)
            self.profiler.start()

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if self.profiler and self.begun == self.start + self.steps - 1:
            self._write(state.global_step)

    def ended(self) -> None:
        """Write what there is of a run that ends amid the traced steps. One that ends before them says so."""
        if self.profiler:
            self._write(None)
        elif self.begun < self.start:
            _log.warning("profile: the run had %d steps, and none was traced: start is %d", self.begun, self.start)

    def _write(self, step: int | None) -> None:
        profiler, self.profiler = self.profiler, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or the last kernels would be missing
        profiler.stop()
        rank = self.run.world.number
        file = self.run.home / FOLDER / f"rank-{rank}.json.gz"
        try:
            file.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(file))
            with gzip.open(file, "rt") as trace:
                found = summary(json.load(trace)["traceEvents"])
        except OSError as error:
            _log.warning("profile: %s: %s", file, error.strerror or error)
            return
        events.add(self.run.directory, "profile", step=step, rank=rank, trace=str(file), **found)


Event = dict[str, Any]  # of a trace, as Chrome reads it


def profiled(run: Run) -> list[ProfileSteps]:
    """Return what traces this rank, if the recipe says so."""
    asked = run.settings.recipe.training.profile
    wants = asked and asked["memory"] and torch.cuda.is_available()
    if wants and not memory_snapshots.record():  # on every rank: which one will lack memory is not known
        _log.warning("profile: this torch cannot record which line allocates what")
    ranks = run.world.size * run.strategy.replicas
    if asked and run.world.is_main_rank and max(asked["ranks"]) >= ranks:
        _log.warning("profile: there is no rank %d among %d", max(asked["ranks"]), ranks)
    if not asked or run.world.number not in asked["ranks"]:
        return []
    return [ProfileSteps(run, asked["start"], asked["steps"])]


def summary(trace: Iterable[Event]) -> dict[str, Any]:
    """Return what a trace in Chrome's format says in short.

    seconds: from its first operation to its last; parts: of these, those with computing, with sending alone, and with neither
    kernels: seconds of the LARGEST, by name, each sum over all its calls; device: whether they ran on a GPU
    """
    whole = [event for event in trace if event.get("ph") == "X" and event.get("dur")]
    kernels = [event for event in whole if event.get("cat") in _ON_DEVICE]
    device, spent = bool(kernels), defaultdict[str, float](float)
    for event in kernels:
        spent[event["name"][:_NAME]] += event["dur"] / 1e6
    if not device:
        kernels = [event for event in whole if event.get("cat") == "cpu_op"]
        for name, seconds in _own_times(kernels):
            spent[name[:_NAME]] += seconds
        kernels += [event for event in whole if event["name"].startswith(_GLOO)]
    if not kernels:
        return {"seconds": 0.0, "parts": {}, "kernels": {}, "device": False}
    computing, sending = list[Interval](), list[Interval]()
    for event in kernels:
        begin = event["ts"] / 1e6
        (sending if event["name"].lower().startswith(_SENDS) else computing).append((begin, begin + event["dur"] / 1e6))
    seconds = max(end for _, end in computing + sending) - min(begin for begin, _ in computing + sending)
    worked, busy = _covered(computing), _covered(computing + sending)
    parts = {
        "computing": worked,
        "communication that nothing hides": busy - worked,
        "waiting": max(0.0, seconds - busy),
    }
    largest = heapq.nlargest(LARGEST, spent.items(), key=lambda item: item[1])
    return {"seconds": seconds, "parts": parts, "kernels": dict(largest), "device": device}


def _own_times(operations: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Yield each operation's name with its seconds less those of the operations that it calls."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in operations:
        threads[event.get("tid")].append(event)
    for thread in threads.values():
        callers: list[dict[str, Any]] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while callers and event["ts"] >= callers[-1]["ts"] + callers[-1]["dur"]:
                callers.pop()
            if callers:
                yield callers[-1]["name"], -event["dur"] / 1e6
            yield event["name"], event["dur"] / 1e6
            callers.append(event)


def _covered(intervals: list[Interval]) -> float:
    """Return the seconds that lie in at least one of the intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
