"""The program that this process runs: train.py, or a file of the user's that calls train.main()."""

import hashlib
import sys
from pathlib import Path

from .recipe.files import REPOSITORY
from .recipe.flags import Settings
from .recipe.objectives import is_own

STORY = "train.py"
RUNNER = REPOSITORY / "brigade" / "train" / "__main__.py"  # starts a user's file


def own_program() -> Path | None:
    """Return the user's file that this process runs, None where it is train.py, a prompt or a program that is installed, as
    Jupyter's and pytest's are."""
    named = getattr(sys.modules["__main__"], "__file__", None)
    if not named or (path := Path(named).resolve()) in (REPOSITORY / STORY, RUNNER):
        return None
    return None if path.is_relative_to(Path(sys.prefix).resolve()) else path


def started_as(argv: tuple[str, ...]) -> list[str]:
    """Return the words that start this program with `argv` once more: train.py's where somebody called main() with them."""
    own = own_program() if tuple(sys.argv[1:]) == argv else None
    return [STORY if own is None else str(own), *argv]


def own_code(settings: Settings) -> dict[str, str]:
    """Return a digest of each of the user's files that a run computes with, by its name: of its program, and of its objective."""
    objective = settings.recipe.training.objective
    paths = [own_program(), Path(objective.rpartition(":")[0]).expanduser() if is_own(objective) else None]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths if path}
