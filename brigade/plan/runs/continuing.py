"""Say with which words the command of a run that ended is taken again after a change: in its directory, or in one of its own."""

import shlex
from dataclasses import dataclass, replace

from ...errors.tables import Fields
from ...train.checkpoint import compatibility
from ...train.recipe.files import another_output, read_yaml
from ...train.run import on_disk, same_run
from ...train.run.directory import RECORD, Run


@dataclass(frozen=True)
class Next:
    """How the same command goes on with a change. keeps: whether what was trained so far is kept; words: that it needs besides;
    note: what to know of it"""

    keeps: bool
    words: tuple[str, ...] = ()
    note: str = ""


def after(run: Run, changed: Run) -> Next | None:
    """Return how the command of `run` goes on as `changed`; None where train.py would refuse it (run/directory.py: _open,
    checkpoint/resume.py: choose)."""
    settings, strategy = changed.settings, changed.strategy
    record, there = run.home / RECORD, settings.directory(strategy.name)
    newest = next(iter(on_disk.whole_checkpoints(run.home).values()), None)
    anew = Next(newest is None, note="begins anew" if newest else "")
    if settings.fresh or not record.is_file():
        return anew
    old: Fields = read_yaml(record)
    here = there.resolve() == run.home.resolve() and same_run.another_run(old, settings, strategy)[0] is None
    reads = newest is None or compatibility.refusal(newest, changed) is None
    if here and reads:
        return Next(True)
    words = (another_output(there),) if there.exists() else ()
    sharded_otherwise = same_run.another_run(old, settings, strategy, with_strategy=False)[0] is None
    if newest and sharded_otherwise and reads:
        return Next(True, (*words, shlex.join(["--resume_from_checkpoint", str(newest)])))
    if settings.resume_from_checkpoint:  # it belongs to the run as it was
        return None
    return replace(anew, words=words)
