"""Whether two runs compute the same: the first key in which they differ."""

from collections.abc import Mapping
from typing import Any

from .identity import COMPUTED
from .schema import BY_PROOF, NOT_IN_IDENTITY, Recipe

# What runs did before a key was there, where that is not its default: {"training": {"key": value}}.
BEFORE: dict[str, dict[str, Any]] = {}


def recorded(document: Mapping[str, Any]) -> Recipe:
    """The recipe in a run.yaml, which an earlier version may have written: keys that it lacks get what runs did before they
    were there. Raises ValidationError for a key or a value that this version does not know."""
    sections = {name: BEFORE.get(name, {}) | (document.get(name) or {}) for name in COMPUTED}
    for values in sections.values():
        for key in NOT_IN_IDENTITY:
            values.pop(key, None)
        for key in BY_PROOF:
            if values.get(key) == "auto":
                del values[key]
    return Recipe.model_validate(sections)


def difference(old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """(key, value in old, value in new) of the first key in which two trees of values differ, or None. The key is written
    with dots; the value of a key that one of them lacks is None."""
    before, now = flat(old), flat(new)
    return next(((key, before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)), None)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; long lists by their elements, of which one differs."""
    if isinstance(tree, list) and len(repr(tree)) > 80:
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in flat(below, f"{prefix}{name}.").items()}
