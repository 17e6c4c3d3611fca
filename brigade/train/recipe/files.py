"""Find the files that a recipe names, and read YAML. This module imports no torch."""

import copy
import functools
import json
import os
import shlex
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, nearest
from ...errors.tables import Fields
from ..host import files
from ..host.limits import CONFIG_BYTES, YAML_NODES

REPOSITORY = Path(__file__).resolve().parents[3]
DEFAULT_RECIPE = REPOSITORY / "recipes" / "tiny" / "full.yaml"

CALIBRATION = "BRIGADE_CALIBRATION"
LAUNCHED = "BRIGADE_LAUNCHED"  # in the environment: a JSON file, {absolute path: text} of what `launch` has read


def calibration_file() -> Path | None:
    """The file with the user's own figures for the planner (plan/hardware/calibration.py), whether it exists or not; None where
    the environment asks for none."""
    named = os.environ.get(CALIBRATION, "~/.config/brigade/calibration.yaml")
    return Path(named).expanduser() if named else None


def launched_texts() -> dict[str, str]:
    """{absolute path: text} of the files that a launch has read: all its attempts run what these said then. {} outside of one."""
    file = os.environ.get(LAUNCHED)
    return _launched_texts(file) if file else {}


@functools.cache
def _launched_texts(file: str) -> dict[str, str]:
    return json.loads(files.read(Path(file)))  # type: ignore[no-any-return]


def text_of(path: Path) -> str:
    """The text of a recipe, or of a file that a recipe names: of a launch, as it was then. Raises OSError, UnicodeDecodeError."""
    known = launched_texts().get(str(path.absolute()))
    return files.read_text(path, CONFIG_BYTES) if known is None else known


def find(name: str, place: str, what: str) -> Path:
    """A file or directory that a user named, relative to this directory or else to the repository's root.

    what: the kind of thing, for the message. Raises UserError at `place` where there is neither.
    """
    with suppress(OSError, RuntimeError):  # a name too long for the file system; ~somebody whom nobody knows
        for candidate in (Path(name).expanduser(), REPOSITORY / name):
            if candidate.exists() or str(candidate.absolute()) in launched_texts():
                return candidate
    problem = f"there is no {what} {name!r} here or in {REPOSITORY}"
    # "host": if other hosts have the file, it is not mounted on this one.
    raise UserError(place, problem, _cure_of_name(name), "host")


def _cure_of_name(name: str) -> str:
    """What to write instead of a name that leads nowhere: the most similar name beside it, or the recipe of that name."""
    path, cure = Path(name), "check the path's spelling"
    with suppress(OSError, RuntimeError, ValueError):
        for root in (Path(), REPOSITORY):
            folder = root / path.parent
            best = nearest(path.name, [file.name for file in folder.iterdir()]) if folder.is_dir() else None
            if best:
                return f"{cure}: did you mean {path.parent / best}?"
        for recipe in (REPOSITORY / "recipes" / name / "full.yaml", REPOSITORY / "recipes" / name):
            if recipe.exists() and name:
                return f"did you mean {recipe.relative_to(REPOSITORY)}?"
    return cure


def another_output(directory: Path) -> str:
    """`--output_dir NAME-2`: the flag with a free name beside this directory, or inside it if it is `.`, `..` or `/`."""
    if directory.name in ("", ".."):
        directory /= "run"
    free = (directory.with_name(f"{directory.name}-{n}") for n in range(2, 10_000))
    return shlex.join(["--output_dir", str(next(path for path in free if not path.exists()))])


def is_directory(path: Path) -> UserError:
    """The error for a directory where a file is wanted. It names the first YAML files in the directory."""
    inside = [str(file) for file in sorted([*path.glob("*.yaml"), *path.glob("*/*.yaml")])]
    cure = f"name one of its files: {', '.join(inside[:4])}{', ...' * (len(inside) > 4)}" if inside else "name a file"
    return UserError(str(path), "it is a directory, not a file", cure)


TWICE = "stands twice in its table, and all but the last would be lost"


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a key that stands twice, of which PyYAML silently takes the last, and aliases that stand for too much."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        check_nodes(node)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """The text of a scalar. JSON writes a letter beyond U+FFFF as two escapes, and PyYAML leaves these apart."""
        return super().construct_scalar(node).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"{key.value!r}, first on line {lines[key.value]}, {TWICE}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def check_nodes(node: yaml.Node | None) -> None:
    """Raise ConstructorError where a tree has too many nodes, counting each alias as all that it stands for: a few lines of
    aliases to aliases can mean billions. An alias inside what it stands for counts once."""
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counts:
            counts[id(node)] = 1
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = (part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,)))
            counts[id(node)] = 1 + sum(map(count, pairs))
        return counts[id(node)]

    if node is not None and count(node) > YAML_NODES:
        problem = f"with its aliases it has more than {YAML_NODES:,} keys and values, more than any such file"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises YAMLError, ValueError (a number of thousands of digits) or RecursionError."""
    return copy.deepcopy(_parsed(text))


@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> Any:
    """The value of a YAML text. A recipe takes PyYAML tens of milliseconds, and a command may read it several times."""
    return yaml.load(text, Loader=_EachKeyOnce)


def _cure_of_record(path: Path) -> str:
    """How a damaged run.yaml comes back: each of a run's checkpoints holds a copy. "" for any other file."""
    if path.name != "run.yaml":
        return ""
    copies = [file for file in path.parent.glob("checkpoint-*/brigade.json") if file.parent.name[11:].isdecimal()]
    if not copies:
        return "bring it back from a copy; without one, --fresh moves the run aside and begins anew"
    newest = str(max(copies, key=lambda file: int(file.parent.name[11:])))
    script = f"import json; print(json.dumps(json.load(open({newest!r}))['run']))"
    return f"a checkpoint has a copy: python -c {shlex.quote(script)} > {shlex.quote(str(path))}"


def read_yaml(path: Path) -> Fields:
    """The mapping in a YAML file. Raises UserError with the line for anything else, and for a key that stands twice."""
    if path.is_dir():
        raise is_directory(path)
    try:
        document = parse_yaml(text_of(path))
    except OSError as error:
        raise UserError(
            str(path), f"it cannot be read: {error.strerror}", "check the file and its permissions"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bytes that are no text; 2024-13-45
        mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", error))
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        if problem.endswith(TWICE):
            raise UserError(place, problem, "keep one of them, with all that belongs under it") from None
        raise UserError(place, f"not YAML: {problem}", _cure_of_record(path) or "fix that line") from None
    if not isinstance(document, dict):
        content = {type(None): "is empty", list: "holds a list"}.get(type(document), "holds a single value")
        cure = _cure_of_record(path) or "see recipes/tiny/full.yaml"
        raise UserError(str(path), f"it {content}, not keys and values", cure)
    return document
