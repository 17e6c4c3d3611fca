"""Our own tables in YAML, and what a document in JSON or YAML is to a type checker."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

# Keys and values of a config.json, a ds_config, a message or a record. Whoever reads one knows its keys, and checks the values.
Document = Mapping[str, Any]
Fields = dict[str, Any]  # a document that is being made


@functools.cache
def table(path: Path) -> Any:
    """The content of one of our own YAML files. Not for a user's: libyaml is eight times as fast, but deep nesting crashes it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
