"""Files of the user's: the program that this process runs, if it is not train.py, and Python that a recipe names.

Whoever wrote a recipe or a run.yaml may be a stranger. So a file that it names runs only if the command line names it too, or
permits its content: --allow_code FILE=SHA256.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import UserError, first_line
from .files import REPOSITORY
from .objectives import SCORES, is_own
from .remote_code import ALLOW
from .settings import Settings
from .training_section import TrainingSection

STORY = "train.py"
RUNNER = REPOSITORY / "brigade" / "train" / "__main__.py"  # starts a user's file

TASKS = "eval_tasks"
# Every key of a recipe that names Python, and the files that it names; the code of models has a flag of its own
# (recipe/remote_code.py).
NAMES_CODE: dict[str, Callable[[TrainingSection], list[str]]] = {
    "objective": lambda training: [_file_of(training.objective)] if is_own(training.objective) else [],
    "token_loss": lambda training: [_file_of(training.token_loss)] if training.token_loss else [],
    "answer_score": lambda training: [
        _file_of(name) for name in [training.answer_score] if name and name not in SCORES
    ],
    TASKS: lambda training: [name for name in training.eval_tasks if is_task_file(name)],
}


def own_program() -> Path | None:
    """Return the user's file that this process runs, None where it is train.py, a prompt or a program that is installed, as
    Jupyter's and pytest's are. Raises UserError for one that no file holds, as of `python -`."""
    named = getattr(sys.modules["__main__"], "__file__", None)
    if not named:
        return None
    path = Path(named).resolve()
    if path in (REPOSITORY / STORY, RUNNER):
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
    program = own_program()
    return digests_of([*([program] if program else []), *function_files(settings).values()])


def digests_of(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return a digest of each file by its name; files of one name in different folders have one together. Raise OSError."""
    named = {path.resolve(): path.name for path in (Path(path).expanduser() for path in paths)}
    contents = defaultdict[str, bytes](bytes)
    for path, name in named.items():
        contents[name] += path.read_bytes()
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}


def function_files(settings: Settings) -> dict[str, str]:
    """Return the Python file of each function that the recipe names, by its key: {"token_loss": "loss.py"}."""
    named = {key: names(settings.recipe.training) for key, names in NAMES_CODE.items() if key != TASKS}
    return {key: files[0] for key, files in named.items() if files}


def is_task_file(name: str) -> bool:
    """Whether a task of lm_eval is named by a YAML file or a folder, which can name Python files, and not by its name there."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def check_functions(settings: Settings) -> None:
    """Raise UserError where a recipe, and not the command line, names a Python file that the command line does not permit."""
    for key, path in function_files(settings).items():
        if Path(path).expanduser().is_file():  # hosts may have it where this machine does not
            _permitted_source(settings, key, path)


def check_code(settings: Settings) -> None:
    """Raise UserError likewise, and for files of tasks: these name further files, which no digest of theirs covers."""
    check_functions(settings)
    names, files = settings.recipe.training.eval_tasks, NAMES_CODE[TASKS](settings.recipe.training)
    if files and not _is_by_flag(settings, TASKS) and not settings.recipe.model.trust_remote_code:
        problem = f"{files[0]} is a task file, which can run Python code"
        cure = f"read it; if you trust who wrote it, name it in this command: --eval_tasks {','.join(names)}"
        raise UserError(settings.place(TASKS), problem, cure)


def permission(settings: Settings) -> list[str]:
    """Return the words that permit another command the files which check_functions() has permitted this one."""
    files = function_files(settings)
    sources = {path: _permitted_source(settings, key, path) for key, path in files.items()}
    return [word for path, source in sources.items() for word in (ALLOW, f"{path}={_digest(source)}")]


def _file_of(function: str) -> str:
    """Return the path in `path/to/file.py:function`."""
    return function.rpartition(":")[0]


def _digest(source: bytes) -> str:
    """Return all of a file's SHA-256: whoever writes two files can have them agree in a part of it."""
    return hashlib.sha256(source).hexdigest()


def _is_by_flag(settings: Settings, key: str) -> bool:
    return settings.place(key) == f"flag --{key}"


def _permitted_source(settings: Settings, key: str, path: str) -> bytes:
    """Return the text of a Python file that the recipe names by `key`. Raise UserError where it cannot be read, and where nobody
    but the recipe's author says that it is to run."""
    place, file = settings.place(key), Path(path).expanduser()
    if not file.is_file():
        raise UserError(place, f"there is no file {path}", "give the path of a Python file, from the working directory")
    try:
        source = file.read_bytes()
    except OSError as error:
        raise UserError(place, f"{path} cannot be read: {error.strerror}", "check the file's permissions") from None
    if _is_by_flag(settings, key) or _digest(source) in settings.allowed:
        return source
    problem = f"it would run the Python file {path}"
    problem += f", whose content {ALLOW} does not permit" if settings.allowed else ""
    cure = f"read it; if you trust who wrote it, add {ALLOW} {path}={_digest(source)} to this command"
    raise UserError(place, problem, cure)


def own_function(settings: Settings, key: str) -> Any:
    """Return the function that the recipe names by `key`, as `path/to/file.py:function`. Raises UserError where there is none, or
    where nothing permits its file.

    What runs is the text whose digest was permitted: Python's own import would take a compiled file beside it instead.
    """
    place, path = settings.place(key), function_files(settings)[key]
    source, name = (
        _permitted_source(settings, key, path),
        str(getattr(settings.recipe.training, key)).rpartition(":")[2],
    )
    module = ModuleType(f"own_{Path(path).stem}")
    module.__file__ = str(Path(path).expanduser())
    try:
        exec(compile(source, module.__file__, "exec"), vars(module))
    except Exception as error:
        problem = f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise UserError(place, problem, "mend the file") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if callable(value)) or "none"
        raise UserError(place, f"{path} has no function {name!r}", f"name one that it has: {there}")
    return function
