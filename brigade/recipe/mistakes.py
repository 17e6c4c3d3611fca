"""What is said of a flag, a section, a key or a value that a recipe does not have."""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError, did_you_mean, shortened, shown
from ..errors.tables import table
from .schema import BY_PROOF, SECTION_OF, SECTIONS

OTHER_NAMES: dict[str, str] = table(Path(__file__).with_name("other_names.yaml"))


def unknown_section(path: Path, name: str) -> UserError:
    """What to say of a section `name` in a recipe."""
    home = f"{name!r} belongs under {SECTION_OF[name]}:" if name in SECTION_OF else OTHER_NAMES.get(name)
    return UserError(f"{path}: {name}", "there is no such section", home or did_you_mean(name, SECTIONS))


def unknown_flag(word: str, known: set[str]) -> UserError:
    """What to say of a word that is no flag among `known`."""
    name = word.split("=")[0].lstrip("-")
    if not word.startswith("-"):
        return UserError("command line", f"unexpected word {word!r}", "flags are written --name value")
    cure = OTHER_NAMES.get(name.replace("-", "_")) or did_you_mean(name, known)
    return UserError(f"flag --{name}", "there is no such flag", cure)


def explain(error: ValidationError, sources: dict[str, str], path: Path, document: dict[str, Any]) -> UserError:
    """The first of pydantic's complaints about a recipe's document, in our words. sources: as of flags.Settings"""
    first, *others = error.errors()
    section, key, *_ = [*map(str, first["loc"]), ""]
    dotted = f"{section}.{key}" if key else section
    place = sources.get(key) or f"{path}: {dotted}"
    if first["type"] == "extra_forbidden":
        home = SECTION_OF.get(key)
        cure = OTHER_NAMES.get(key) or (f"it belongs under {home}:" if home else did_you_mean(key, SECTION_OF))
        return UserError(place, f"there is no such key (its value: {shortened(repr(first['input']))})", cure)
    if first["type"] == "missing":
        return UserError(place, "it is missing", f"add {key or section!r}; see recipes/tiny/full.yaml")
    # A key that takes several types has one complaint for each of them.
    same = [other for other in others if len(first["loc"]) == len(other["loc"]) == 3 and other["loc"][1] == key]
    wanted = " or ".join([*dict.fromkeys(map(_wanted, [first, *same])), *["'auto'"] * (key in BY_PROOF)])
    value = document.get(section)
    if key:
        value = value.get(key) if isinstance(value, dict) else value
    elif value is None:
        return UserError(place, "it is empty", f"give it {wanted}; see recipes/tiny/full.yaml")
    return UserError(place, f"{shown(value)} is not {wanted}", f"give {wanted}")


def _wanted(complaint: Any) -> str:
    """What a value should be, in one of pydantic's complaints."""
    if complaint["type"] == "model_type":
        return "a section of keys and values"
    if complaint["loc"][-1] == "[key]":
        return "a table whose keys are words"
    said = complaint["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    said = re.split(r", (?:unable|got) ", said)[0].replace("a valid integer", "an integer").replace("a valid ", "a ")
    return f"a number {said}" if said.startswith(("greater ", "less ")) else said
