"""Where a checkpoint lies before it has its name, and what a run that died left behind."""

import shutil
from pathlib import Path

from ..distributed import heartbeat

SAVING = ".saving"  # in the output directory: what is being written, and what is being removed
REPLACED = ".replaced"  # the suffix of a checkpoint that another of the same step takes the place of


def remove(directory: Path) -> None:
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
