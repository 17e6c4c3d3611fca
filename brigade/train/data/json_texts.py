"""JSON that stands in texts, and what Python and NumPy print of the same values, as tables in CSV hold it."""

import ast
import functools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .arrow_values import DECODER
from .rows import BadRow

# What Python writes otherwise than JSON: texts, constants, and NumPy's arrays, whose elements no comma divides.
_PYTHON = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\(?s:.|\Z))*(?:'|\Z)|"(?:[^"\\]|\\(?s:.|\Z))*(?:"|\Z))|\b(?P<constant>True|False|None)\b|(?P<gap>\}\s+(?=\{))|\barray\(|,\s*dtype=object\)"""
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def from_json(value: object, called: str) -> Any:
    """Return a value that may be JSON in a text. Raises BadRow, naming what it is `called`, where the text is no JSON."""
    try:
        return DECODER.decode(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:80]
        raise BadRow(f"{called} are not JSON: {reason}", "fix them") from None


def from_any_text(value: object, called: str) -> Any:
    """Return a value as from_json() does; the text may also be JSON in a text, or a repr."""
    read = value_of(value) if isinstance(value, str) else value
    return from_json(value, called) if read is None else read


def value_of(text: str) -> Any:
    """Return the value of a text of JSON, of JSON in a text, or of a repr; None where it is none of them."""
    spellings: tuple[Callable[[str], str], ...] = (str, functools.partial(_PYTHON.sub, _json_of))
    for spell in spellings:
        with suppress(ValueError, SyntaxError, RecursionError):
            value = DECODER.decode(spell(text))
            return value_of(value) if isinstance(value, str) else value
    return None


def _json_of(found: re.Match[str]) -> str:
    if found["text"]:
        return json.dumps(ast.literal_eval(found["text"]))  # a text by itself: nothing nested, and nothing that runs
    return _CONSTANTS[found["constant"]] if found["constant"] else "}," * bool(found["gap"])
