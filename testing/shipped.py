"""The recipes, strategies and hostfiles that the project ships. What users add to the same folders is theirs: tests leave it out.

They stand in shipped.txt and not only in git, because a downloaded archive has no git.
"""

from pathlib import Path, PurePath

from .ranks import REPOSITORY

FOLDERS = ("recipes", "ds_configs", "accelerate_configs", "hostfiles")
NAMES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split()


def shipped(pattern: str) -> list[Path]:
    """Return the paths of all shipped files that a pattern means, "recipes/*/*.yaml" for instance, sorted."""
    return sorted(REPOSITORY / name for name in NAMES if PurePath(name).match(pattern))
