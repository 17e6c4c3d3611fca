"""What `train.py --help` prints: what most runs set, one section or key, or all."""

import argparse
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, did_you_mean
from .files import read_yaml
from .schema import BY_MEMORY, BY_PROOF, SECTION_OF, SECTIONS

FLAGS = ("-h", "--help")
MOST_SET = Path(__file__).with_name("most_set.yaml")
ALL = "all"
MANY = 4  # values
POINTER = (
    "`python train.py --help` shows the flags that most runs set. More: "
    f"--help SECTION ({', '.join(SECTIONS)}), --help KEY, --help {ALL} ({len(SECTION_OF)} keys)."
)


def topic(argv: Sequence[str]) -> str | None:
    """Return what a command line asks help of: the word behind --help, "" where there is none; None where it asks for none."""
    for place, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name in FLAGS:
            behind = value or next(iter(argv[place + 1 :]), "")
            return "" if behind.startswith("-") else behind
    return None


def text(parser: argparse.ArgumentParser, topic: str) -> str:
    """Return the help of a section, of a key, of ALL, or ("") of what most runs set. parser: flags.parser(), which is changed.

    Raise UserError for another topic.
    """
    if topic in ("", ALL):
        keys = set(SECTION_OF) if topic else set(read_yaml(MOST_SET))
    elif topic in SECTIONS:
        keys = set(SECTIONS[topic].model_fields)
    elif topic in SECTION_OF:
        keys = {topic}
    else:
        known = [ALL, *SECTIONS, *SECTION_OF]
        raise UserError("flag --help", f"{topic!r} is no section and no key of a recipe", did_you_mean(topic, known))
    for action in parser._actions:
        if action.dest in keys:
            _explain(action, brief=not topic)
        elif action.dest in SECTION_OF or topic not in ("", ALL):
            action.help = argparse.SUPPRESS
    parser.epilog = POINTER if topic != ALL else None
    return parser.format_help()


def _explain(action: argparse.Action, brief: bool) -> None:
    """Let a flag say what its key means, which values it takes, and its default. brief: the first sentence, of few values"""
    info = SECTIONS[SECTION_OF[action.dest]].model_fields[action.dest]
    default = "required" if info.is_required() else "optional"
    if info.default is not None and not info.is_required():
        value = yaml.safe_dump(info.default, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        default = f"default: {value}"
    said = info.description or ""
    if brief and ". " in said:
        said = f"{said.partition('. ')[0]}."
    action.help = f"{said} ({default})".strip().replace("%", "%%")
    kind = _kind(info.annotation) + "|auto" * (action.dest in (*BY_PROOF, *BY_MEMORY))
    action.metavar = "NAME" if brief and kind.count("|") >= MANY else kind


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
