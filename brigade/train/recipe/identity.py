"""Which keys decide what a run computes, and its short name. This module imports no torch."""

import hashlib
import json
from typing import Any

from .schema import NOT_IN_IDENTITY, Recipe

COMPUTED = ("model", "data", "training")  # sections that decide what a run computes
DEFAULTS = 1  # raise it when a key's default changes: a recipe without the key is then another run


def computed(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """The keys that decide what a run computes, {section: {key: value}}: hosts, machine and watching aside.

    options: of pydantic's model_dump
    """
    return {
        name: getattr(recipe, name).model_dump(mode="json", exclude=NOT_IN_IDENTITY, **options) for name in COMPUTED
    }


def identity(recipe: Recipe, strategy: Any) -> str:
    """A run's short name: a hash of what it computes and of how states are sharded. Only what differs from the defaults
    counts, so that a key more in a later version renames no run. Whether two runs are the same, difference.py says."""
    text = json.dumps([DEFAULTS, computed(recipe, exclude_defaults=True), strategy], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
