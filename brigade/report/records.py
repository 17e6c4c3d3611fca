"""What a run's directory tells of it: log, events, answers and settings. What is broken or missing becomes a note, not an error.

A directory of plain Transformers, which has a trainer_state.json but no run.yaml, can be read too.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..errors.tables import Fields
from ..train.host import files
from ..train.recipe.objectives import SFT
from ..train.run import directory as runs
from ..train.run import events, on_disk, status, typed

# Plain Transformers' name of a figure -> Brigade's, where they differ.
OTHER_NAMES = {"num_input_tokens_seen": "tokens", "train_tokens_per_second": "tokens_per_second"}
SECTIONS = ("model", "data", "training", "cluster")  # of a recipe
_SECTIONS: dict[str, typed.Fields] = {name: {} for name in SECTIONS} | {
    "run": typed.RUN | {"prediction": typed.is_table}
}
Entry = Fields  # of a log


@dataclass
class Record:
    """One run.

    settings: run.yaml, whose "run" says what was resolved and measured
    known: the run's status (train/run/status.py)
    steps: what was logged, one entry for each step, in order; "seconds": since the run first began
    evaluations: the same, with "loss" over all sources, and "NAME_loss" for each where there are several
    events: the lines of events.jsonl; notes: what could not be read, in words
    """

    directory: Path
    name: str
    settings: Fields = field(default_factory=dict)
    known: Fields = field(default_factory=dict)
    steps: list[Entry] = field(default_factory=list)
    evaluations: list[Entry] = field(default_factory=list)
    events: list[Entry] = field(default_factory=list)
    answers: list[Entry] = field(default_factory=list)
    tasks: list[Entry] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> Fields:
        """run.yaml's record of what was resolved; {} where there is none."""
        return self.settings.get("run", {})

    @property
    def training(self) -> Fields:
        """The recipe's section of that name; {} where there is none."""
        return self.settings.get("training", {})

    @property
    def objective(self) -> str:
        """What the run learns, by the recipe's name; runs of earlier versions learn answers."""
        return str(self.training.get("objective", SFT))

    @property
    def verdict(self) -> tuple[str, str]:
        """(running, succeeded, stopped, failed or ended; a sentence about it)."""
        state, step = self.known.get("state", "ended"), self.steps[-1]["step"] if self.steps else 0
        steps = self.known.get("steps")
        at = f"at step {step}" + (f" of {steps}" if steps else "")
        marker = self.known.get("marker", {})
        last = [line for line in self.events if line.get("event") in ("failed", "fault", "started")][-1:]
        reason = last[0].get("text") or last[0].get("what") if last else None
        if reason and (state == "ended" or (state == "running" and last[0]["event"] == "failed")):  # it is about to end
            return "failed", f"It failed {at}: {reason}"
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


def read_records(directories: list[Path]) -> list[Record]:
    """A record of each run. Raises UserError where a directory holds nothing of a run."""
    names = _short_names(directories)
    return [_record(directory, name) for directory, name in zip(directories, names, strict=True)]


def number(value: object) -> float | None:
    """A figure of a log as a float, NaN and infinity included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer with 400 digits
        return math.inf


def numbers(entries: Iterable[Entry], key: str) -> list[float]:
    """The values of a key that are numbers, in order."""
    values = (number(entry.get(key)) for entry in entries)
    return [value for value in values if value is not None]


def _record(directory: Path, name: str) -> Record:
    record = Record(directory, name)
    try:
        runs.check_exists(directory)
        record.checkpoints = sorted(on_disk.step_of(path) for path in on_disk.checkpoints(directory))
        record.settings = _settings(record)
        record.events = _lines(record, events.FILE, typed.EVENT)
        record.answers = _lines(record, runs.ANSWERS, typed.ANSWER)
        record.tasks = _lines(record, runs.TASK_RESULTS, typed.TASK)
        logged = _trainer_state(record)
    except OSError as error:
        raise UserError(
            str(directory), f"it cannot be read: {error.strerror}", "ask its owner for the right to"
        ) from None
    if not (record.settings or record.events or logged):
        wanted = f"it has neither {runs.RECORD}, {events.FILE} nor {on_disk.STATE}"
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


def _settings(record: Record) -> Fields:
    path = record.directory / runs.RECORD
    if not path.exists():
        return {}
    try:
        document = runs.read_yaml(path)
        return document | {name: typed.kept(document[name], of) for name, of in _SECTIONS.items() if name in document}
    except UserError as error:
        record.notes.append(f"{error.place}: {error.problem}.")
        return {}


def _lines(record: Record, name: str, fields: typed.Fields) -> list[Entry]:
    """The lines of a .jsonl file that are whole tables. The number of the others becomes a note."""
    path, entries, broken = record.directory / name, [], 0
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
            entries.append(entry)
        else:
            broken += 1
    if broken:
        lines = "line of it is" if broken == 1 else "lines of it are"
        record.notes.append(f"{name}: {broken} {lines} broken or half written, and left out.")
    return entries


def _trainer_state(record: Record) -> list[Entry]:
    """The log_history of the newest trainer_state.json."""
    directory = record.directory
    paths = [directory / on_disk.STATE, *(path / on_disk.STATE for path in on_disk.checkpoints(directory))]
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
    """Add steps and evaluations as the Trainer logs them. Events, taken later, override them."""
    for entry in log:
        entry = {OTHER_NAMES.get(key, key): value for key, value in entry.items()}
        if "loss" in entry:
            record.steps.append(entry)
        elif "eval_loss" in entry:
            kept = {key.removeprefix("eval_"): value for key, value in entry.items()}
            record.evaluations.append(kept | {"seconds": None, "took": kept.get("runtime")})


def _take_events(record: Record) -> None:
    """Add steps and evaluations with their times. A run that went back to a checkpoint has trained the later steps again."""
    entries = {"step": record.steps, "evaluation": record.evaluations}
    logged = {kind: {entry["step"]: entry for entry in of_kind} for kind, of_kind in entries.items()}
    at = {kind: dict(of_kind) for kind, of_kind in logged.items()}
    from_events: dict[str, set[int]] = {kind: set() for kind in at}
    began = next((when for line in record.events if (when := seconds_of(line)) is not None), None)
    for line in record.events:
        step, when, kind = line.get("step"), seconds_of(line), line.get("event")
        if step is None:
            continue
        since = None if when is None or began is None else when - began
        if kind == "started":
            for which, known in from_events.items():
                for later in [each for each in known if each > step]:
                    known.discard(later)
                    at[which].pop(later, None)
        elif kind in at:
            took = {"took": line.get("seconds")} if kind == "evaluation" else {}
            at[kind][step] = logged[kind].get(step, {}) | line | {"seconds": since} | took
            from_events[kind].add(step)
    record.steps, record.evaluations = ([of_kind[step] for step in sorted(of_kind)] for of_kind in at.values())
    _count_tokens(record)


def _count_tokens(record: Record) -> None:
    """Set the tokens so far of each evaluation, and of steps whose log lacks them (from speed and time, if that is all)."""
    before, so_far = 0, 0.0
    at: dict[int, float] = {}
    for entry in record.steps:
        speed, time_ = number(entry.get("tokens_per_second")), number(entry.get("step_time"))
        logged = number(entry.get("tokens"))
        so_far = logged if logged is not None else so_far + (speed or 0.0) * (time_ or 0.0) * (entry["step"] - before)
        entry["tokens"] = at[entry["step"]] = so_far
        before = entry["step"]
    reached = 0.0
    for entry in record.evaluations:
        reached = max((at[step] for step in at if step <= entry["step"]), default=0.0) if at else reached
        entry["tokens"] = reached


def seconds_of(line: Entry) -> float | None:
    """The time of an event in seconds since 1970."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, ValueError):
        return None


@dataclass
class Attempt:
    """One start of a run. idle: seconds since the last sign of the attempt before; lost: steps that were trained again"""

    began: str
    step: int
    ranks: Any
    hosts: str
    idle: float
    lost: int
    ended_by: str = ""


def attempts(record: Record) -> list[Attempt]:
    """All starts of the run, each with what ended it."""
    starts: list[Attempt] = []
    last, reached = None, 0
    for line in record.events:
        when, kind = seconds_of(line), line.get("event")
        if kind == "started":
            step = line.get("step", 0)
            idle = when - last if starts and when is not None and last is not None else 0.0
            hosts = ", ".join(map(str, line.get("hosts") or []))
            lost = max(0, reached - step) if starts else 0
            starts.append(Attempt(str(line.get("time", ""))[:19], step, line.get("ranks", ""), hosts, idle, lost))
            reached = step
        elif kind in ("failed", "fault", "stopped") and starts:
            starts[-1].ended_by = str(line.get("text") or line.get("what") or f"stopped by {line.get('by', '?')}")
        elif kind == "step":
            reached = line.get("step", reached)
        last = when if when is not None and kind not in ("fault", "restart", "failed") else last
    return starts


def events_of(record: Record, *kinds: str) -> Iterator[Entry]:
    """The run's events of these kinds, in order."""
    return (line for line in record.events if line.get("event") in kinds)


def _short_names(directories: list[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    parts = [path.absolute().parts for path in directories]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path.absolute().name} ({place})" for place, path in enumerate(directories, 1)]  # one directory twice
