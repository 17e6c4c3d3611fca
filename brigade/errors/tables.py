"""Our own tables in YAML."""

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def table(path: Path) -> Any:
    """The content of one of our own YAML files. Not for a user's: libyaml is eight times as fast, but deep nesting crashes it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
