"""Flags of train.py, from keys and values."""

import json
from typing import Any


def as_flags(**values: Any) -> list[str]:
    """`--key value` of each, as YAML reads it: None is null, True is true."""
    return [
        word
        for key, value in values.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
