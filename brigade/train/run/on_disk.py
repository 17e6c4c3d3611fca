"""The checkpoints in a run's directory: which there are, whole or not, the step of each, and what a run that died left of one.
Needs only the standard library, for launch asks it on hosts, and a job's script before any rank starts."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..distributed import heartbeat
from ..host import files

MANIFEST = "brigade.json"  # the last file of a checkpoint (checkpoint/manifest.py)
STATE = "trainer_state.json"  # Trainer writes it last into a checkpoint, and at a run's end beside the model
SAVING = ".saving"  # in the output directory: what is being written, and what is being removed
REPLACED = ".replaced"  # the suffix of a checkpoint that another of the same step takes the place of


@dataclass(frozen=True)
class Found:
    """A checkpoint in a run's directory or in its object storage. name: of its directory; whole: whether a run can continue from
    it"""

    name: str
    step: int
    whole: bool


def checkpoints(directory: Path) -> list[Path]:
    """Every checkpoint-N in it, newest first, whole or not; of two with the same step, first the one that is named after it."""
    steps = {path.name: step_of(path) for path in directory.glob("checkpoint-*") if is_named(path.name)}
    return [directory / name for name in newest_first(steps)]


def newest_first(steps: Mapping[str, int]) -> list[str]:
    """Sort names of checkpoints, {name: step}; of two with the same step, the one that is named after it is first."""
    return sorted(steps, key=lambda name: (steps[name], steps[name] == named_step(name)), reverse=True)


def beyond(limit: int, found: Sequence[Found], newest: str, best: str | None) -> list[str]:
    """Return the names of the checkpoints to remove where `limit` may stay: never the newest or the best, nor one ahead of the
    newest, and others only while as many as the limit are whole. A copy of one that stays takes no place of another.

    found: newest first; newest: known to be whole
    """
    latest = next((each.step for each in found if each.name == newest), -1)  # nothing goes where it is not seen
    kept = {latest} | {each.step for each in found if each.name == best and each.whole}
    names = []
    for each in found:
        if each.name in (newest, best):
            continue
        if each.whole and each.step not in kept and len(kept) < limit:
            kept.add(each.step)
        elif each.step < latest:
            names.append(each.name)
    return names


def whole_checkpoints(directory: Path) -> dict[int, Path]:
    """step -> checkpoint-N, of those that were written to their end, newest first."""
    found: dict[int, Path] = {}
    for path in checkpoints(directory):
        if (path / STATE).is_file():
            found.setdefault(step_of(path), path)
    return found


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint-N directory (recorded_step)."""
    return recorded_step(checkpoint.name, lambda file: files.read(checkpoint / file))


def recorded_step(name: str, read: Callable[[str], bytes]) -> int:
    """The step of a checkpoint, as its manifest says or, without one, Trainer's state. Its name, which may have been changed
    since, counts where neither can be read. read: returns a file's content; OSError where it is not there"""
    for file, key in (MANIFEST, "step"), (STATE, "global_step"):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            step = json.loads(read(file))[key]
            if isinstance(step, int) and step >= 0:
                return step
    return named_step(name)


def is_named(name: str) -> bool:
    """Whether it is a checkpoint's name."""
    return name.startswith("checkpoint-") and name.removeprefix("checkpoint-").isdecimal()


def named_step(name: str) -> int:
    """The N of checkpoint-N; -1 for a directory that a user calls otherwise."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def remove_leftovers(directory: Path) -> None:
    """Remove what no checkpoint became, and old heartbeats. Call it when this process has the directory, before ranks train."""
    for folder in SAVING, heartbeat.FOLDER:
        if (directory / folder).is_symlink():  # others made it, and what lies behind it is not this run's
            (directory / folder).unlink()
    for old in (directory / SAVING).glob(f"*{REPLACED}"):
        name = directory / old.name.removesuffix(REPLACED)
        if not name.exists():
            old.rename(name)  # the run died between two renames: the new one had no name yet
    for old in (directory / heartbeat.FOLDER).glob("rank-*.json"):
        old.unlink(missing_ok=True)
    shutil.rmtree(directory / SAVING, ignore_errors=True)
