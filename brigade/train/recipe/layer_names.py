"""What names of layers in a recipe mean: the end of a name, or a regular expression for it. This module imports no torch."""

import re
from collections.abc import Iterable

_METACHARACTERS = frozenset("\\^$*+?[](){}|")  # a dot is in ordinary names too


def is_pattern(name: str) -> bool:
    """Whether a name is a regular expression: it has another metacharacter than a dot."""
    return not _METACHARACTERS.isdisjoint(name)


def fits(layer: str, name: str) -> bool:
    """Whether a layer of the model is meant: by its whole name, or by its end after a dot (PEFT's get_pattern_key)."""
    if is_pattern(name):
        return re.match(rf"(.*\.)?({name})$", layer) is not None
    return layer == name or layer.endswith(f".{name}")


def check_patterns(names: Iterable[str]) -> None:
    """Raise ValueError for a regular expression that is none."""
    for name in names:
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(f"names of layers, or regular expressions: {name!r} is none ({error})") from None
