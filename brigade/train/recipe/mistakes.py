"""Errors for flags, sections, keys and values that do not exist, with what to write instead."""

import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ...errors import LIKELY, UserError, did_you_mean, nearest, shortened, shown
from ...errors.tables import Document, table
from .data_section import WeightedSource
from .objectives import OBJECTIVES
from .schema import BY_MEMORY, BY_PROOF, SECTION_OF, SECTIONS

_TABLE = table(Path(__file__).with_name("other_names.yaml"))
ONLY_FLAGS: list[str] = _TABLE["flags"]
# Another tool's name -> ours.
RENAMED: dict[str, str] = {theirs: ours for ours, names in _TABLE["renamed"].items() for theirs in names}
# Another tool's name -> its value in words -> the keys that mean it here; or the key that takes the value.
MEANINGS: dict[str, dict[str, Document] | str] = _TABLE["meanings"]
UNSUPPORTED = {name: group["do"] for group in _TABLE["unsupported"] for name in group["names"]}
_COMPARING = ", ".join(name for name, objective in OBJECTIVES.items() if objective.compares)
# A name that other tools use -> what to do here.
OTHER_NAMES: dict[str, str] = {
    **{theirs: f"it is called {ours} here{', a flag' * (ours in ONLY_FLAGS)}" for theirs, ours in RENAMED.items()},
    **{name: group["do"].replace("OBJECTIVES", _COMPARING) for group in _TABLE["instead"] for name in group["names"]},
    **UNSUPPORTED,
}
MANY = 8  # choices, beyond which a message lists them once
_HIDDEN = {"local_rank", "local-rank"}  # given by launchers, not by users


def unknown_sections(path: Path, names: list[str]) -> UserError:
    """The error for all unknown sections of a recipe: of a flat file of another tool, where each key belongs.

    names: at least one
    """
    if len(names) == 1:
        (name,) = names
        return UserError(f"{path}: {name}", _absent(name, "section"), cure_of(name) or did_you_mean(name, SECTIONS))
    problem = f"{len(names)} keys stand outside the sections {', '.join(SECTIONS)}: {', '.join(names)}"
    moves = f"`python -m brigade lint {path} --write DIR` writes a recipe of what has an equal here; or by hand: "
    return UserError(str(path), problem, moves + _each(names))


def _each(names: Iterable[str]) -> str:
    """Return what to do about each of these keys: sections with those that belong there, then advice."""
    homes: dict[str, list[str]] = {section: [] for section in SECTIONS}
    further = []
    for name in names:
        ours = RENAMED.get(name, name)
        if ours in SECTION_OF:
            homes[SECTION_OF[ours]].append(name if ours == name else f"{name} as {ours}")
        else:
            further.append(f"{name}: {cure_of(name) or nothing_like(name)}")
    moved = [f"under {section}: {', '.join(keys)}" for section, keys in homes.items() if keys]
    return "; ".join([*moved, *further])


def unknown_flag(word: str, known: set[str]) -> UserError:
    """The error for a word of the command line that is no flag among `known`."""
    name = word.split("=")[0].lstrip("-")
    if not word.startswith("-"):
        cure = f"write --recipe {word}" if word.endswith((".yaml", ".yml")) else "flags are written --name value"
        return UserError("command line", f"unexpected word {word!r}", cure)
    cure = OTHER_NAMES.get(name.replace("-", "_")) or did_you_mean(name, known - _HIDDEN)
    return UserError(f"flag --{name}", _absent(name, "flag"), cure)


def nothing_like(name: str) -> str:
    """What to do about a key that nobody knows, among others: the nearest one, or that there is none."""
    meant = nearest(name, SECTION_OF, LIKELY)
    return f"did you mean {meant!r}?" if meant else "nothing is like it here: leave it out"


def _absent(name: str, kind: str) -> str:
    of_trainer = name.replace("-", "_") in UNSUPPORTED
    return "Transformers' Trainer takes it, and Brigade does not" if of_trainer else f"there is no such {kind}"


def cure_of(name: str) -> str | None:
    """What to do about a misplaced key, a flag, or another tool's key in a recipe; None for any other name."""
    if name in SECTION_OF:
        return f"{name!r} belongs under {SECTION_OF[name]}:"
    if name in ONLY_FLAGS:
        return f"it is a flag of train.py, not a key: --{name}"
    return "it is called ds_config, and belongs under cluster:" if name == "deepspeed" else OTHER_NAMES.get(name)


def complaints(error: ValidationError) -> list[ErrorDetails]:
    """What pydantic says of a recipe, with what is missing last: it may stand there under nearly its name."""
    return sorted(error.errors(), key=lambda one: one["type"] == "missing")


def explain(error: ValidationError, sources: dict[str, str], path: Path, document: Document) -> UserError:
    """The first of pydantic's complaints about a recipe's document, in our words. sources: as in settings.Settings"""
    first, *others = complaints(error)
    section, key, *_ = [*map(str, first["loc"]), ""]
    dotted = f"{section}.{key}" if key else section
    place = sources.get(key) or f"{path}: {dotted}"
    inner = [str(part) for part in first["loc"][2:] if part != "[key]"]
    is_name = (first["type"], first["loc"][-1]) == ("literal_error", "[key]")  # of a column, in `columns`
    if inner and (is_name or first["type"] == "extra_forbidden"):
        known = re.findall("'([^']*)'", first.get("ctx", {}).get("expected", "")) or WeightedSource.model_fields
        return UserError(".".join([place, *inner]), _absent(inner[-1], "key"), did_you_mean(inner[-1], known))
    if first["type"] == "extra_forbidden":
        unknown = [str(one["loc"][1]) for one in (first, *others) if one["type"] == "extra_forbidden"]
        if len(unknown) > 1:
            problem = f"{len(unknown)} keys are not known here: {', '.join(unknown)}"
            return UserError(f"{path}: {section}", problem, _each(unknown))
        cure = cure_of(key) or did_you_mean(key, SECTION_OF)
        return UserError(place, f"{_absent(key, 'key')} (its value: {shortened(repr(first['input']))})", cure)
    if first["type"] == "missing":
        return UserError(place, "it is missing", f"add {key or section!r}; see recipes/tiny/full.yaml")
    # A key that takes several types has one complaint for each of them.
    same = [other for other in others if len(first["loc"]) == len(other["loc"]) == 3 and other["loc"][1] == key]
    wanted = " or ".join([*dict.fromkeys(map(_wanted, [first, *same])), *["'auto'"] * (key in (*BY_PROOF, *BY_MEMORY))])
    value = document.get(section)
    if key:
        value = value.get(key) if isinstance(value, dict) else value
    elif value is None:
        return UserError(place, "it is empty", f"give it {wanted}; see recipes/tiny/full.yaml")
    if key == "loss_type" and value in (*OBJECTIVES,):  # TRL's DPOTrainer has IPO by its loss_type
        cure = f"set objective: {value}, and leave loss_type out"
        return UserError(place, f"{shown(value)} is an objective of its own", cure)
    words = re.findall("'([^']*)'", wanted)
    begun = [word for word in words if word.startswith(f"{value}_")]  # adamw: the first is what most people mean
    meant = nearest(value, words, LIKELY) or next(iter(begun), None) if isinstance(value, str) else None
    cure = f"did you mean {meant!r}?" if meant else "give one of them" if len(words) > MANY else f"give {wanted}"
    if any(one["type"] == "string_type" for one in (first, *same)):
        written: Any = document  # for pydantic does not see a bool as it is
        for step in first["loc"]:  # of which some name a type
            written = written[step] if isinstance(written, dict) and step in written else written
        cure = _quoted(written) or cure
    return UserError(place, f"{shown(value)} is not {wanted}", cure)


def _quoted(value: object) -> str | None:
    """What to do about a word that YAML takes for something else where a text is wanted; None for what no word is."""
    if isinstance(value, bool):
        words = "yes, on and true" if value else "no, off and false"
        return f'quote it, as "{"yes" if value else "no"}": YAML reads {words} as {str(value).lower()}'
    return f'quote it: "{value}"' if isinstance(value, int | float | date) else None


def _wanted(complaint: ErrorDetails) -> str:
    """What a value should be, by one of pydantic's complaints."""
    if complaint["type"] == "model_type":
        return "a section of keys and values"
    if complaint["loc"][-1] == "[key]":
        return "a table whose keys are words"
    wanted = complaint["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    wanted = (
        re.split(r", (?:unable|got) ", wanted)[0]
        .replace("a valid integer", "an integer")
        .replace("a valid boolean", "true or false")
        .replace("a valid ", "a ")
    )
    return f"a number {wanted}" if wanted.startswith(("greater ", "less ")) else wanted
