"""Where a run continues. What judges checkpoints is choosing.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..distributed import ranks
from ..run import directory as runs
from . import choosing

Choice = tuple[Path | None, tuple[str, ...]]


def choose(run: runs.Run, fingerprint: str, base: Mapping[str, str], damaged: Mapping[str, str]) -> Choice:
    """The checkpoint of choosing.choose(), and which ones it leaves out; None where no checkpoint is named and the run's
    directory has none."""
    settings = run.settings
    if not settings.resume_from_checkpoint and (settings.fresh or not _any_checkpoint(run)):
        return None, ()
    return choosing.choose(run, fingerprint, base, damaged)


def _any_checkpoint(run: runs.Run) -> bool:
    return bool(runs.checkpoints(run.directory) or runs.checkpoints(run.own_directory))


def agree(run: runs.Run, fingerprint: str, base: Mapping[str, str]) -> Choice:
    """choose(), of which every byte is what was written: all ranks together read it. A collective.

    Where hosts have output directories of their own: the newest that is whole on all of them.
    End all ranks with one message where choose() raises UserError on any, and where a file could run code when it is loaded.
    """
    damaged: dict[str, str] = {}
    while True:
        with ranks.agreed(run.world):
            folder, skipped = choose(run, fingerprint, base, damaged)
        if not any(folders := ranks.gather(folder and folder.name)):
            return None, skipped
        problems = ranks.gather(choosing.problem_together(run, folder, folders))
        if not any(problems):
            with ranks.agreed(run.world):
                choosing.check_pickles(run, folder)
            return folder, skipped
        damaged |= dict(filter(None, problems))


def how_to_continue(run: runs.Run, state: Any) -> str:
    """For a run that is interrupted."""
    return choosing.how_to_continue(run, state)
