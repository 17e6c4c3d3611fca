"""What a run's directory says of it: log, events, answers and settings. What is broken or missing is a note, and no error.

A directory of plain Transformers, which has trainer_state.json and no run.yaml, can be read too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..train import files
from ..train.run import directory as runs
from ..train.run import events, status, typed

# What plain Transformers calls a figure, where Brigade has another name for it.
OTHER_NAMES = {"num_input_tokens_seen": "tokens", "train_tokens_per_second": "tokens_per_second"}
Entry = dict[str, Any]


@dataclass
class Record:
    """One run.

    settings: run.yaml, of which "run" says what was resolved and measured
    steps: what was logged, one entry for a step, in their order; "seconds" since the run first began
    evaluations: likewise, with "loss" over all sources and "NAME_loss" of each where there are several
    events: as events.jsonl has them; notes: what could not be read, in words
    """

    directory: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    steps: list[Entry] = field(default_factory=list)
    evaluations: list[Entry] = field(default_factory=list)
    events: list[Entry] = field(default_factory=list)
    answers: list[Entry] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> dict[str, Any]:
        """run.yaml's record of what was resolved; {} where there is none."""
        found = self.settings.get("run")
        return found if isinstance(found, dict) else {}

    @property
    def verdict(self) -> tuple[str, str]:
        """(running, succeeded, stopped, failed or ended; a sentence for people)."""
        state, step = self.known.get("state", "ended"), self.steps[-1]["step"] if self.steps else 0
        at = f"at step {step}" + (f" of {steps}" if (steps := self.known.get("steps")) else "")
        marker = self.known.get("marker", {})
        last = [line for line in self.events if line.get("event") in ("failed", "fault", "started")][-1:]
        said = last[0].get("text") or last[0].get("what") if last else None
        if said and (state == "ended" or (state == "running" and last[0]["event"] == "failed")):  # it is about to end
            return "failed", f"It failed {at}: {said}"
        if state == "running":
            return state, f"It is running, {at}."
        if state == "succeeded":
            before, after = marker.get("held_out_loss_before"), marker.get("held_out_loss")
            losses = [f"{loss:.4f}" for loss in (before, after) if isinstance(loss, float)]
            told = f" Held-out loss {' before, '.join(losses)} after {marker.get('steps')} steps." if losses else ""
            return state, f"It reached its end.{told}"
        if state == "stopped":
            return state, f"It was stopped by {marker.get('by', 'somebody')} {at}. The same command continues it."
        return state, f"It ended before its end, {at}, and left no word why: it was killed, or its host went away."


def read(directories: list[Path]) -> list[Record]:
    """A record of each. Raises UserError where a directory holds nothing of a run."""
    names = _short_names(directories)
    return [_record(directory, name) for directory, name in zip(directories, names, strict=True)]


def number(value: Any) -> float | None:
    """A figure of a log as a float, NaN and infinity included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer with 400 digits
        return math.inf


def _record(directory: Path, name: str) -> Record:
    record = Record(directory, name)
    try:
        runs.check_exists(directory)
        record.checkpoints = sorted(runs.step_of(path) for path in runs.checkpoints(directory))
        record.settings = _settings(record)
        record.events = _lines(record, events.FILE, typed.EVENT)
        record.answers = _lines(record, runs.ANSWERS, typed.ANSWER)
        logged = _trainer_state(record)
    except OSError as error:
        raise UserError(
            str(directory), f"it cannot be read: {error.strerror}", "ask its owner for the right to"
        ) from None
    if not (record.settings or record.events or logged):
        wanted = f"it has neither {runs.RECORD}, {events.FILE} nor {runs.STATE}"
        problem = "; ".join([wanted, *record.notes])
        raise UserError(str(directory), problem, "name the output directory of a run that has begun")
    if not record.settings:
        record.notes.append(f"There is no readable {runs.RECORD}: recipe, hosts and versions are not known.")
    _take_log(record, logged)
    _take_events(record)
    try:
        record.known = status.of(directory) if record.settings else {"state": "succeeded" if logged else "ended"}
    except (UserError, OSError, TypeError, AttributeError) as error:
        record.notes.append(f"How it stands cannot be told: {error}")
    if not record.steps:
        record.notes.append("No step has been logged yet.")
    return record


def _settings(record: Record) -> dict[str, Any]:
    path = record.directory / runs.RECORD
    if not path.exists():
        return {}
    try:
        found = runs.read_yaml(path)
        return found | {"run": typed.kept(found["run"], typed.RUN)} if "run" in found else found
    except UserError as error:
        record.notes.append(f"{error.place}: {error.problem}.")
        return {}


def _lines(record: Record, name: str, fields: typed.Fields) -> list[Entry]:
    """The whole lines of a .jsonl file that are tables; how many others there were is a note."""
    path, found, broken = record.directory / name, [], 0
    if not path.exists():
        return []
    try:
        text = files.read_text(path, events.MOST, "replace")
    except OSError as error:
        record.notes.append(f"{name} cannot be read: {error.strerror}.")
        return []
    for line in filter(None, text.split("\n")):
        try:
            entry = typed.kept(typed.loaded(line), fields)
        except ValueError:
            entry = {}
        if entry:
            found.append(entry)
        else:
            broken += 1
    if broken:
        lines = "line of it is" if broken == 1 else "lines of it are"
        record.notes.append(f"{name}: {broken} {lines} broken or half written, and left out.")
    return found


def _trainer_state(record: Record) -> list[Entry]:
    """log_history of the newest trainer_state.json."""
    directory = record.directory
    paths = [directory / runs.STATE, *(path / runs.STATE for path in runs.checkpoints(directory))]
    for path in filter(Path.exists, paths):
        try:
            log = [typed.kept(entry, typed.EVENT) for entry in typed.loaded(files.read(path))["log_history"]]
            return [entry for entry in log if "step" in entry]
        except OSError as error:
            record.notes.append(f"{path.relative_to(directory)} cannot be read: {error.strerror}.")
        except (ValueError, KeyError, TypeError):
            record.notes.append(f"{path.relative_to(directory)} is broken or half written, and left out.")
    return []


def _take_log(record: Record, log: list[Entry]) -> None:
    """Steps and evaluations as Trainer logs them; what events say comes over it."""
    for entry in log:
        entry = {OTHER_NAMES.get(key, key): value for key, value in entry.items()}
        if "loss" in entry:
            record.steps.append(entry)
        elif "eval_loss" in entry:
            kept = {key.removeprefix("eval_"): value for key, value in entry.items()}
            record.evaluations.append(kept | {"seconds": None, "took": kept.get("runtime")})


def _take_events(record: Record) -> None:
    """Steps and evaluations with their times. A run that went back to a checkpoint has trained the steps behind it anew."""
    steps = {entry["step"]: entry for entry in record.steps}
    evaluations = {entry["step"]: entry for entry in record.evaluations}
    from_events: tuple[set[int], set[int]] = set(), set()
    began = next((when for line in record.events if (when := seconds_of(line)) is not None), None)
    for line in record.events:
        step, when = line.get("step"), seconds_of(line)
        if isinstance(step, bool) or not isinstance(step, int):
            continue
        since = None if when is None or began is None else when - began
        if line.get("event") == "started":
            for found, known in zip((steps, evaluations), from_events, strict=True):
                for later in [each for each in known if each > step]:
                    known.discard(later)
                    found.pop(later, None)
        elif line.get("event") == "step":
            steps[step] = steps.get(step, {}) | line | {"seconds": since}
            from_events[0].add(step)
        elif line.get("event") == "evaluation":
            entry = evaluations.get(step, {}) | line | {"seconds": since, "took": line.get("seconds")}
            evaluations[step] = entry
            from_events[1].add(step)
    record.steps = [steps[step] for step in sorted(steps)]
    record.evaluations = [evaluations[step] for step in sorted(evaluations)]
    _count_tokens(record)


def _count_tokens(record: Record) -> None:
    """Tokens so far, of each evaluation and of logs that do not say them; from speed and time where that is all there is."""
    before, so_far = 0, 0.0
    at: dict[int, float] = {}
    for entry in record.steps:
        speed, time_ = number(entry.get("tokens_per_second")), number(entry.get("step_time"))
        told = number(entry.get("tokens"))
        so_far = told if told is not None else so_far + (speed or 0.0) * (time_ or 0.0) * (entry["step"] - before)
        entry["tokens"] = at[entry["step"]] = so_far
        before = entry["step"]
    reached = 0.0
    for entry in record.evaluations:
        reached = max((at[step] for step in at if step <= entry["step"]), default=0.0) if at else reached
        entry["tokens"] = reached


def seconds_of(line: Entry) -> float | None:
    """When an event was, in seconds since 1970."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


@dataclass
class Attempt:
    """One start of a run. idle: seconds since the last sign of the one before; lost: steps that were trained anew"""

    began: str
    step: int
    ranks: Any
    hosts: str
    idle: float
    lost: int
    ended_by: str = ""


def attempts(record: Record) -> list[Attempt]:
    """Every start of the run, and what ended the one before it."""
    found: list[Attempt] = []
    last, reached = None, 0
    for line in record.events:
        when, kind = seconds_of(line), line.get("event")
        if kind == "started":
            step = line["step"] if isinstance(line.get("step"), int) else 0
            idle = when - last if found and when is not None and last is not None else 0.0
            hosts = ", ".join(map(str, line.get("hosts") or []))
            lost = max(0, reached - step) if found else 0
            found.append(Attempt(str(line.get("time", ""))[:19], step, line.get("ranks", ""), hosts, idle, lost))
            reached = step
        elif kind in ("failed", "fault", "stopped") and found:
            found[-1].ended_by = str(line.get("text") or line.get("what") or f"stopped by {line.get('by', '?')}")
        elif kind == "step" and isinstance(line.get("step"), int):
            reached = line["step"]
        last = when if when is not None and kind not in ("fault", "restart", "failed") else last
    return found


def of_kind(record: Record, *kinds: str) -> Iterator[Entry]:
    return (line for line in record.events if line.get("event") in kinds)


def _short_names(directories: list[Path]) -> list[str]:
    """The last parts of their paths, as many as tell them apart."""
    parts = [path.absolute().parts for path in directories]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path.absolute().name} ({place})" for place, path in enumerate(directories, 1)]  # one directory twice
