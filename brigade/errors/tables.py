"""Our own tables in YAML."""

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def table(path: Path) -> Any:
    """One of our own tables. libyaml is eight times as fast, but a user's deeply nested file would crash it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
