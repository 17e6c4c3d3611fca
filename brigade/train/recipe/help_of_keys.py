"""What --help says of a recipe's keys: each one's docstring, what it takes, and its default."""

import argparse
import types
import typing
from typing import Any

import yaml

from .schema import BY_PROOF, SECTION_OF, SECTIONS


def add(parser: argparse.ArgumentParser) -> None:
    """Add it to flags.parser()."""
    for action in parser._actions:
        if (key := action.dest) in SECTION_OF:
            info = SECTIONS[SECTION_OF[key]].model_fields[key]
            default = "required" if info.is_required() else "optional"
            if info.default is not None and not info.is_required():
                text = yaml.safe_dump(info.default, default_flow_style=True, width=1000).removesuffix("...\n").strip()
                default = f"default: {text}"
            action.help = f"{info.description or ''} ({default})".strip().replace("%", "%%")
            action.metavar = _kind(info.annotation) + "|auto" * (key in BY_PROOF)


def _kind(annotation: Any) -> str:
    """What --help calls the values of a key: `int`, `float or auto`, `linear|cosine`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [_kind(part) for part in typing.get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    return {bool: "true|false", str: "text", list: "list", dict: "table"}.get(
        typing.get_origin(annotation) or annotation, getattr(annotation, "__name__", "value")
    )
