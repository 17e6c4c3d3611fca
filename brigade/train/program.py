"""Files of the user's: the program that this process runs, if it is not train.py, and functions that a recipe names."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from .recipe.files import REPOSITORY
from .recipe.flags import Settings
from .recipe.objectives import is_own

STORY = "train.py"
RUNNER = REPOSITORY / "brigade" / "train" / "__main__.py"  # starts a user's file


def own_program() -> Path | None:
    """Return the user's file that this process runs, None where it is train.py, a prompt or a program that is installed, as
    Jupyter's and pytest's are. Raises UserError for one that no file holds, as of `python -`."""
    named = getattr(sys.modules["__main__"], "__file__", None)
    if not named or (path := Path(named).resolve()) in (REPOSITORY / STORY, RUNNER):
        return None
    if not path.is_file():
        problem = (
            "the program is in no file, and a run has to read it: to tell whether it changed, and to start it again"
        )
        raise UserError(named, problem, "save it, and start it as python FILE")
    return None if path.is_relative_to(Path(sys.prefix).resolve()) else path


def started_as(argv: tuple[str, ...]) -> list[str]:
    """Return the words that start this program with `argv` once more: train.py's where somebody called main() with them."""
    typed = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # DeepSpeed's, for a process
    kept = [word for word in argv if not word.startswith("--local_rank")]
    own = own_program() if typed == kept else None
    return [STORY if own is None else str(own), *argv]


def own_code(settings: Settings) -> dict[str, str]:
    """Return a digest of each of the user's files that a run computes with, by its name: of its program, and of its losses."""
    training = settings.recipe.training
    named = [training.objective] * is_own(training.objective) + [training.token_loss] * bool(training.token_loss)
    paths = [own_program(), *(Path(str(name).rpartition(":")[0]).expanduser() for name in named)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths if path}


def own_function(named: str, place: str) -> Any:
    """Return the function of `path/to/file.py:function`. place: where it is named. Raises UserError where there is none."""
    path, _, name = named.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(place, f"there is no file {path}", "give the path of a Python file, from the working directory")
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        problem = f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise UserError(place, problem, "mend the file") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if callable(value)) or "none"
        raise UserError(place, f"{path} has no function {name!r}", f"name one that it has: {there}")
    return function
