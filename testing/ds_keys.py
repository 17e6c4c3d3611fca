"""The table of DeepSpeed's keys, and the keys of a config as it names them."""

from collections.abc import Iterator
from typing import Any

import yaml

from .ranks import REPOSITORY

TABLE = yaml.safe_load((REPOSITORY / "brigade/train/strategy/ds_keys.yaml").read_text())
ALLOWED, REMOVED, OWNED, DEPRECATED = (TABLE[part] for part in ("allowed", "removed", "owned_by_recipe", "deprecated"))


def paths_of(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """a, a.b and a.b.c of {"a": {"b": {"c": 1}}}."""
    for key, value in config.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from paths_of(value, f"{prefix}{key}.")
