"""Where a run continues. What judges checkpoints (choosing.py) is imported when there is one."""

from pathlib import Path
from typing import Any

from ..distributed import ranks
from ..run import directory as runs
from . import choosing


def choose(run: runs.Run, fingerprint: str, base: dict[str, str]) -> Path | None:
    """choosing.choose(), which see; None where no checkpoint is named and the run's directory has none."""
    settings = run.settings
    if not settings.resume_from_checkpoint and (settings.fresh or not _any_checkpoint(run)):
        return None
    return choosing.choose(run, fingerprint, base)


def _any_checkpoint(run: runs.Run) -> bool:
    return bool(runs.checkpoints(run.directory) or runs.checkpoints(run.own_directory))


def agree(run: runs.Run, fingerprint: str, base: dict[str, str]) -> Path | None:
    """choose(), of which every byte is what was written: all ranks together read it. A collective.

    Where hosts have output directories of their own: the newest that is whole on all of them.
    Ends all ranks with one message where choose() raises UserError on any, and where a file could run code when it is loaded.
    """
    while True:
        with ranks.agreed(run.world):
            folder = choose(run, fingerprint, base)
        if not any(folders := ranks.gather(folder and folder.name)):
            return None
        problems = ranks.gather(choosing.problem_together(run, folder, folders))
        if not any(problems):
            with ranks.agreed(run.world):
                choosing.check_pickles(run, folder)
            return folder
        run.damaged |= dict(filter(None, problems))


def how_to_continue(run: runs.Run, state: Any) -> str:
    """For a run that is interrupted."""
    return choosing.how_to_continue(run, state)
