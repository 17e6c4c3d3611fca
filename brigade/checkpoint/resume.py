"""Where a run continues. What judges checkpoints (choosing.py) is imported when there is one."""

from pathlib import Path
from typing import Any

from ..run import directory as runs


def choose(run: runs.Run, fingerprint: str, base: dict[str, str]) -> Path | None:
    """choosing.choose(), which see; None where no checkpoint is named and the run's directory has none."""
    settings = run.settings
    if not settings.resume_from_checkpoint and (settings.fresh or not runs.checkpoints(run.directory)):
        return None
    from . import choosing

    return choosing.choose(run, fingerprint, base)


def how_to_continue(run: runs.Run, state: Any) -> str:
    """For a run that is interrupted."""
    from . import choosing

    return choosing.how_to_continue(run, state)
