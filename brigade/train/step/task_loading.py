"""Find and load benchmark tasks of EleutherAI's lm-evaluation-harness (the optional package lm_eval).

Nothing here imports the Trainer: a run looks for its tasks before it imports that.
"""

import importlib.util
import logging
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError, did_you_mean, first_line
from ..recipe.files import find
from ..recipe.program import is_task_file
from ..recipe.settings import Settings

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE, INSTALL = "lm_eval", "pip install -r requirements-eval.txt"

Tasks = dict[str, Any]  # lm_eval's, by their names


def check_package(place: str) -> None:
    """Raise UserError where lm_eval is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(place, f"{PACKAGE!r} is not installed on this host", INSTALL, "host")


def prepare(settings: Settings) -> None:
    """Look for the tasks of a recipe, and load their data into the cache, before anything is trained. Raise UserError."""
    names = settings.recipe.training.eval_tasks
    if names:
        load(names, settings.place("eval_tasks"))


def load(names: list[str], place: str) -> Tasks:
    """Load tasks with their data: names that lm_eval knows, YAML files, or folders of YAML files.

    Return what TaskManager.load returns: "tasks" and "groups" by name, and "group_map".

    Raise UserError at `place` for a task that does not exist, and for data that cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    paths = {name: find(name, place, "task file or folder").resolve() for name in names if is_task_file(name)}
    folders = [str(path) for path in paths.values() if path.is_dir()]
    manager = TaskManager(include_path=folders, include_defaults=len(paths) < len(names))
    wanted: list[str] = []
    for name in names:
        if name in paths:
            wanted += _in_folder(manager, paths[name], place) if paths[name].is_dir() else [str(paths[name])]
        elif name in manager.all_tasks:
            wanted.append(name)
        else:
            cure = f"{_near(name, manager.all_tasks)}; a task of your own is a .yaml file or a folder of such: ./my_task.yaml"
            raise UserError(place, f"lm_eval {version(PACKAGE)} has no task {name!r}", cure)
    tasks: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in wanted:
        for kind, found in _load_one(manager, name, place).items():
            tasks[kind] |= found
    return tasks


def _in_folder(manager: "TaskManager", folder: Path, place: str) -> list[str]:
    """The names of the tasks and groups whose files lie in `folder`."""
    entries = manager.task_index.items()
    found = [name for name, entry in entries if entry.yaml_path and folder in entry.yaml_path.resolve().parents]
    if not found:
        raise UserError(place, f"no .yaml file in {folder} describes a task", "name a folder with a task file in it")
    return sorted(found)


def _near(name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, 5, 0.6)
    return f"did you mean {', '.join(near)}?" if near else did_you_mean(name, known)


def _load_one(manager: "TaskManager", name: str, place: str) -> Tasks:
    try:
        loaded = manager.load([name])
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False):
                problem = f"{task.task_name} runs the code that a model writes, on this machine"
                raise UserError(
                    place, problem, "leave it out, and evaluate the saved model in a sandbox by lm_eval itself"
                )
            len(task.eval_docs)
        return loaded
    except UserError:
        raise
    except Exception as error:  # of datasets, its readers, the hub's client, a task's own code
        problem = f"task {name} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        cure = "check its file; where the hub cannot be reached, load its data beforehand on a machine with the same HF_HOME, "
        raise UserError(place, problem, cure + "or write a task file whose data_files are local") from None
