"""Which keys decide what a run computes, its short name, and whether two runs compute the same. This module imports no torch."""

import hashlib
import json
from typing import Any

from ...errors.tables import Document, Fields
from .schema import BY_PROOF, NOT_IN_IDENTITY, Recipe

COMPUTED = ("model", "data", "training")  # sections that decide what a run computes
DEFAULTS = 1  # raise it when a key's default changes: a recipe without the key is then another run
# What runs did before a key existed, where that is not its default: {"training": {"key": value}}.
BEFORE: dict[str, dict[str, Any]] = {}


def computed(recipe: Recipe, **options: bool) -> Fields:
    """The keys that decide what a run computes, {section: {key: value}}, without those for hosts, machine and watching.

    options: of pydantic's model_dump
    """
    sections = {
        name: getattr(recipe, name).model_dump(mode="json", exclude=NOT_IN_IDENTITY, **options) for name in COMPUTED
    }
    if sections["data"].get("max_eval_samples") == "auto":  # it holds out and trains on the same as null
        sections["data"]["max_eval_samples"] = None
    return sections


def identity(recipe: Recipe, strategy: list[object]) -> str:
    """A run's short name: a hash of what it computes and of how states are sharded.

    Only what differs from the defaults counts, so that a new key in a later version renames no run. difference() says
    whether two runs are the same.
    """
    text = json.dumps([DEFAULTS, computed(recipe, exclude_defaults=True), strategy], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(document: Document) -> Recipe:
    """The recipe in a run.yaml, which an earlier version may have written: keys that it lacks get what runs did before those
    keys existed. Raises ValidationError for a key or a value that this version does not know."""
    sections = {name: BEFORE.get(name, {}) | (document.get(name) or {}) for name in COMPUTED}
    for values in sections.values():
        for key in NOT_IN_IDENTITY:
            values.pop(key, None)
        for key in BY_PROOF:
            if values.get(key) == "auto":
                del values[key]
    return Recipe.model_validate(sections)


def difference(old: object, new: object) -> tuple[str, object, object] | None:
    """(key, value in old, value in new) of the first key in which two trees of values differ, or None. The key is written
    with dots; the value of a key that one tree lacks is None."""
    before, now = flat(old), flat(new)
    return next(((key, before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)), None)


def flat(tree: object, prefix: str = "") -> Fields:
    """{"a": {"b": 1}} as {"a.b": 1}. Long lists are taken apart too, so that a difference names one element."""
    if isinstance(tree, list) and len(repr(tree)) > 80:
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in flat(below, f"{prefix}{name}.").items()}
