"""The Python files that come with a model: which they are, and who permits them to run.

The flag --trust_remote_code permits them for one command. The key of that name in a recipe or run.yaml says only that the model
needs them: whoever wrote the file may be a stranger. --allow_code permits a file that a recipe names by its content (program.py).
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ...errors.tables import Fields
from .files import REPOSITORY
from .model_section import ModelSection

FLAG = "--trust_remote_code"
CURE = f"read them; if you trust who wrote them, add {FLAG} to this command"
HELP = "run the Python files that come with the model"
ALLOW_HELP = "run the Python file that the recipe names if it has this SHA-256 (may be given several times)"
ALLOW = "--allow_code"
CONFIGS = ("config.json", "tokenizer_config.json")
GENERATE = "custom_generate/generate.py"  # Transformers runs it too (generation/utils.py: load_custom_generate)
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
SHOWN = 6


def digests(allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the SHA-256 of each FILE=SHA256 that --allow_code gives. Raise UserError for another form."""
    for each in allowed:
        if not re.fullmatch(r".+=[0-9a-f]{64}", each):
            problem = f"{each!r} is not FILE=SHA256, with the 64 digits that `sha256sum FILE` prints"
            raise UserError(f"flag {ALLOW}", problem, "copy the flag from the message that asks for it")
    return tuple(each.rpartition("=")[2] for each in allowed)


def folder_of(name: str) -> Path | None:
    """The local directory of that name, relative to this directory or to the repository; None where there is none."""
    # A name may be too long for the file system, or begin with ~SOMEBODY whom nobody knows.
    with suppress(OSError, RuntimeError, ValueError):
        return next((path for path in (Path(name).expanduser(), REPOSITORY / name) if path.is_dir()), None)
    return None


def files_of(names: Sequence[str], revision: str | None = None) -> str:
    """The Python files that would run, in words: those that the configs of these models name in `auto_map`.

    names: directories, or names on the Hub; revision: the first one's
    Configs on the Hub are only looked up in its cache, so that nothing is asked of the network.
    """
    files: dict[str, None] = {}
    for name in filter(None, names):
        for path, config in _configs(name, revision if name == names[0] else None):
            home = str(path.parent) if folder_of(name) else name
            files |= dict.fromkeys(_named(home, config.get("auto_map")))
            files |= {str(path.parent / GENERATE): None} if (path.parent / GENERATE).is_file() else {}
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return ", ".join([*files][:SHOWN]) + more or f"the Python files of {names[0]!r}"


def refusal(place: str, names: Sequence[str], revision: str | None = None) -> UserError:
    """The error for a command that would run files of these models without the flag. names, revision: as in files_of()"""
    return UserError(place, f"it would run code that comes with the model: {files_of(names, revision)}", CURE)


def names_of(model: ModelSection, recipe: Path) -> list[str]:
    """The models whose code a recipe may ask for: its model, its tokenizer, and what was saved beside a run.yaml."""
    saved = [str(recipe.parent)] if recipe.name == "run.yaml" else []
    return [model.model_name_or_path, model.tokenizer_name_or_path or "", *saved]


def is_refused(error: BaseException) -> bool:
    """Whether Transformers has refused to run a model's files (dynamic_module_utils.py: resolve_trust_remote_code)."""
    return "trust_remote_code" in str(error)


def check_kernels(place: str, name: str, revision: str | None, permitted: bool) -> None:
    """Raise UserError where a config.json names kernels on the Hub, which are code too (Transformers: is_kernel)."""
    for path, config in () if permitted else _configs(name, revision):
        for key, value in _walk(config):
            # The value may be a table, with a kernel for each part of the model, "" for all of it.
            if key.removesuffix("_internal") in KERNELS and "/" in json.dumps(value):
                problem = f"{path} asks for kernels from the Hub, which are code: {key} {value!r}"
                raise UserError(place, problem, f"remove the key, or permit it with {FLAG}")


def _named(home: str, auto_map: object) -> Iterator[str]:
    """The files that an auto_map's entries name: `module.Class`, or `owner/name--module.Class` of another repository."""
    entries = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for entry in entries:
        for reference in entry if isinstance(entry, list | tuple) else [entry]:
            if isinstance(reference, str):
                repository, _, module = reference.rpartition("--")
                yield f"{repository or home}/{module.rpartition('.')[0]}.py"


def _configs(name: str, revision: str | None) -> Iterator[tuple[Path, Fields]]:
    """(path, content) of those configs of a model that are on this machine. name: a directory, or a name on the Hub"""
    folder = folder_of(name)
    for file in CONFIGS if name else ():
        with suppress(OSError, ValueError, RecursionError):  # broken ones run nothing
            path = folder / file if folder else cached(name, file, revision)
            config = json.loads(path.read_text(encoding="utf-8")) if path else None
            if path and isinstance(config, dict):
                yield path, config


def cached(name: str, file: str, revision: str | None) -> Path | None:
    """Return where a file of a model on the Hub lies in its cache, or None, as for what can be no name there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def _walk(table: object) -> Iterator[tuple[str, object]]:
    """All keys of a document, at any depth, with their values."""
    waiting = [table]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield from inner.items()
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
