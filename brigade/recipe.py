"""A recipe's batch arithmetic, its identity, and the files it names. Its keys: schema.py; how a command line becomes one:
flags.py. This module imports no torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .cluster import counted
from .errors import UserError
from .schema import SECTIONS, Recipe, TrainingSection, marked_apart

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_RECIPE = REPOSITORY / "recipes" / "tiny" / "full.yaml"
COMPUTED = ("model", "data", "training")  # sections that decide what a run computes
DEFAULTS = 1  # raise it when a key's default changes: a recipe without the key is then another run
# What runs did before a key was there, where that is not its default: {"training": {"key": value}}.
BEFORE: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Batch:
    """The arithmetic of one optimizer step: global_size = micro x accumulation x data_parallel_size sequences.

    learning_rate: after scaling with the global batch; why: where the micro-batch comes from, if not from the recipe.
    """

    global_size: int
    micro: int
    accumulation: int
    data_parallel_size: int
    learning_rate: float
    why: str = ""

    def __str__(self) -> str:
        micro = f"{self.micro} ({self.why})" if self.why else str(self.micro)
        ranks = counted(self.data_parallel_size, "data-parallel rank")
        return f"{counted(self.global_size, 'sequence')} = micro-batch {micro} x accumulation {self.accumulation} x {ranks}"


def batch_arithmetic(
    training: TrainingSection, data_parallel_size: int, place: str, fits: int = 1, why: str = ""
) -> Batch:
    """Fill accumulation (and an "auto" micro-batch) so that the global batch stays what the recipe says.

    fits, why: the largest micro-batch that "auto" may take, and who says so. One above a rank's whole share becomes that share.
    Learning-rate scaling (Goyal et al. 2017, linear; Krizhevsky 2014, sqrt): lr x (global / reference) or its root.
    Raises UserError at `place` when micro-batch x ranks does not divide the global batch.
    """
    size, ranks, wanted = training.global_batch_size, data_parallel_size, training.per_device_train_batch_size
    if size % ranks:
        unit = ranks if wanted == "auto" else ranks * wanted
        near = sorted({max(unit, size // unit * unit), math.ceil(size / unit) * unit})
        raise UserError(place, f"global_batch_size {size} does not divide over {ranks} data-parallel ranks",
                        f"set it to {' or '.join(map(str, near))}, or use a number of ranks that divides {size}")  # fmt: skip
    share = size // ranks
    if wanted == "auto":
        micro = max(m for m in range(1, min(fits, share) + 1) if share % m == 0)
    else:
        micro, why = min(wanted, share), f"not {wanted}: a rank has no more" if wanted > share else ""
    if share % micro:
        choices = [str(m) for m in range(1, min(share, 1024) + 1) if share % m == 0]
        raise UserError(
            place,
            f"global_batch_size {size} is not micro-batch {micro} x {counted(ranks, 'rank')} x a whole number of "
            "accumulation steps",
            f"set per_device_train_batch_size to {'one of ' if len(choices) > 1 else ''}{', '.join(choices[:8])}",
        )
    factor = size / (training.reference_batch_size or size)
    scale = {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}[training.learning_rate_scaling]
    return Batch(size, micro, share // micro, ranks, training.learning_rate * scale, why)


def computed(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """The keys that decide what a run computes, {section: {key: value}}: hosts, machine and watching aside.

    options: of pydantic's model_dump
    """
    kept: dict[str, Any] = {}
    for name in COMPUTED:
        values = getattr(recipe, name).model_dump(mode="json", **options)
        apart = {key for key, info in SECTIONS[name].model_fields.items() if marked_apart(info)}
        kept[name] = {key: value for key, value in values.items() if key not in apart}
    return kept


def identity(recipe: Recipe, strategy: Any) -> str:
    """A run's short name: a hash of what it computes and of how states are sharded. Only what differs from the defaults
    counts, so that a key more in a later version renames no run. Whether two runs are the same, difference() says."""
    text = json.dumps([DEFAULTS, computed(recipe, exclude_defaults=True), strategy], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def length(training: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, value) of what says how long a run is: max_steps, or num_train_epochs where that is -1."""
    key = "max_steps" if training.get("max_steps", -1) > 0 else "num_train_epochs"
    return key, training.get(key)


def recorded(document: Mapping[str, Any]) -> Recipe:
    """The recipe in a run.yaml, which an earlier version may have written: keys that it lacks get what runs did before they
    were there. Raises ValidationError for a key or a value that this version does not know."""
    sections = {name: BEFORE.get(name, {}) | (document.get(name) or {}) for name in COMPUTED}
    for name, values in sections.items():
        for key, info in SECTIONS[name].model_fields.items():
            if marked_apart(info):
                values.pop(key, None)
    return Recipe.model_validate(sections)


def difference(old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """(key, value in old, value in new) of the first key in which two trees of values differ, or None. The key is written
    with dots; the value of a key that one of them lacks is None."""
    before, now = _flat(old), _flat(new)
    return next(((key, before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)), None)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; long lists by their elements, of which one differs."""
    if isinstance(tree, list) and len(repr(tree)) > 80:
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}{name}.").items()}


def find(name: str, place: str, what: str) -> Path:
    """A file or directory named by a user: as seen from here, or else from the repository's root.

    Raises UserError at `place` when there is neither.
    """
    with suppress(OSError, RuntimeError):  # a name too long for the file system; ~somebody whom nobody knows
        for candidate in (Path(name).expanduser(), REPOSITORY / name):
            if candidate.exists():
                return candidate
    raise UserError(place, f"there is no {what} {name!r} here or in {REPOSITORY}", "check the path's spelling")


def is_directory(path: Path) -> UserError:
    """Where a file is wanted: names the first files that the directory holds."""
    inside = [str(file) for file in sorted([*path.glob("*.yaml"), *path.glob("*/*.yaml")])]
    cure = f"name one of its files: {', '.join(inside[:4])}{', ...' * (len(inside) > 4)}" if inside else "name a file"
    return UserError(str(path), "it is a directory, not a file", cure)


TWICE = "stands twice in its table, and all but the last would be lost"


class _EachKeyOnce(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys without a word; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"{key.value!r}, first on line {lines[key.value]}, {TWICE}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises UserError with the line for anything else, and for a key that stands twice."""
    if path.is_dir():
        raise is_directory(path)
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_EachKeyOnce)
    except OSError as error:
        raise UserError(str(path), f"it cannot be read: {error.strerror}", "check the file's permissions") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bytes that are no text; 2024-13-45
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", error))
        problem = problem if problem.endswith(TWICE) else f"not YAML: {problem}"
        cure = "keep one of them, with all that belongs under it" if problem.endswith(TWICE) else "mend that line"
        raise UserError(f"{path}{line}", problem, cure) from None
    if not isinstance(document, dict):
        what = (
            "is empty" if document is None else f"holds {'a list' if isinstance(document, list) else 'a single value'}"
        )
        raise UserError(str(path), f"it {what}, not keys and values", "see recipes/tiny/full.yaml")
    return document
