"""Names, types and limits of a ds_config's keys, as DeepSpeed's own models have them, by the table ds_keys.yaml.

The table stands in for DeepSpeed so that lint answers at once, also where DeepSpeed is not installed.
tests/unit/test_ds_keys.py holds it equal to the installed DeepSpeed, and lets both judge the same values.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from ..errors import did_you_mean
from ..errors.findings import Finding, shown, table


@functools.cache
def key_table() -> dict[str, Any]:
    """ds_keys.yaml: which keys the pinned DeepSpeed takes, which it dropped, and which the recipe owns."""
    return table(Path(__file__).with_suffix(".yaml"))


def as_json(value: Any) -> str:
    return json.dumps(value, default=str)


def read_keys(
    config: Mapping[str, Any], name: str, found: list[Finding], at: str = "", said: str = ""
) -> dict[str, Any]:
    """The table at path `at`, which the file calls `said`, under first names and with typed values.

    What is wrong is left out of it and added to `found`.
    """
    known, clean = key_table(), dict[str, Any]()
    for spelling, value in config.items():
        path, here = f"{at}{spelling}", f"{said}{spelling}"
        if path in known["removed"]:
            gone = known["removed"][path]
            since = f" (gone since {gone['since']})" if gone["since"] != "older" else ""
            problem = f"DeepSpeed {known['deepspeed']} no longer takes this key{since}: {shown(value, as_json)}"
            found.append(Finding("ds-removed-key", name, here, problem, f"{gone['use']} ({gone['issue']})"))
            continue
        if old := known["deprecated"].get(path):
            problem = f"DeepSpeed {known['deepspeed']} still takes this key, and asks for another ({old['issue']})"
            found.append(Finding("ds-deprecated-key", name, here, problem, old["use"]))
            if "type" in old and not (value is None and "values" in old):
                value, wrong = _read_value(old, True, value)
                if wrong:
                    found.append(Finding("ds-wrong-value", name, here, *wrong))
                    continue
            value = old["values"].get(value) if "values" in old else value
            if value is None:
                continue
            path = old["now"]
        path = _first_names().get(path, path)
        key, entry = path.rpartition(".")[2], known["allowed"].get(path)
        if entry is None:
            siblings = [k.rpartition(".")[2] for k in known["allowed"] if k.rpartition(".")[0] == at.rstrip(".")]
            problem = f"DeepSpeed {known['deepspeed']} knows no such key (its value: {shown(value, as_json)})"
            found.append(Finding("ds-unknown-key", name, here, problem, did_you_mean(str(spelling), siblings)))
        elif key in clean:
            problem = f"{key!r} stands here already under another name, and DeepSpeed takes one alone"
            found.append(Finding("ds-two-spellings", name, here, problem, "keep one of the two"))
        elif value is None and entry.get("default", "") is None:
            continue
        elif entry.get("block") and not isinstance(value, Mapping):
            problem, cure = f"{shown(value)} stands where a table belongs", f'write "{key}": {{...}}; see ds_configs/'
            found.append(Finding("ds-not-a-block", name, here, problem, cure))
        elif entry.get("block"):
            clean[key] = read_keys(value, name, found, f"{path}.", f"{here}.")
        elif value == "auto" and not _is_filled(path):
            default = json.dumps(entry.get("default"))
            problem = f'nobody fills in this "auto": in DeepSpeed\'s typed blocks it becomes the default, {default}'
            cure = "write a value, or remove the line for the default"
            found.append(Finding("ds-auto-not-filled", name, here, problem, cure))
        elif value == "auto" or "type" not in entry:
            clean[key] = value
        else:
            parent = known["allowed"].get(path.rpartition(".")[0], {})
            clean[key], wrong = _read_value(entry, parent.get("block") == "model", value)
            if wrong:
                del clean[key]
                found.append(Finding("ds-wrong-value", name, here, *wrong))
    return clean


@functools.cache
def _first_names() -> dict[str, str]:
    """Paths with a key's second spelling to those with its first."""
    allowed = key_table()["allowed"].items()
    return {f"{path.rpartition('.')[0]}.{entry['also']}": path for path, entry in allowed if "also" in entry}


def _is_filled(path: str) -> bool:
    """Whether "auto" at this path means something: to Transformers, to Brigade, or to DeepSpeed itself."""
    entry = key_table()["allowed"][path]
    return path in key_table()["owned_by_recipe"] or bool(entry.get("auto")) or entry.get("default") == "auto"


def _but(refused: type) -> BeforeValidator:
    """A validator that takes no `refused`."""

    def check(value: Any) -> Any:
        if isinstance(value, refused):
            raise ValueError(refused.__name__)
        return value

    return BeforeValidator(check)


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# The table's types: as pydantic takes them, and in words.
_TYPES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "whole": (Annotated[int, _but(bool)], "a whole number"),
    "float": (float, "a number"),
    "number": (Annotated[float, _but(bool), Field(allow_inf_nan=False)], "a number"),
    "str": (str, "a text"),
    "path": (Path, "a path"),
    "list": (list, "a list"),
    "strings": (Annotated[list[str], BeforeValidator(_names)], "a list of names"),
    "interval": (Annotated[int, _but(str)], '"auto" or a whole number'),
}
_LIMITS = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}


def _read_value(entry: Mapping[str, Any], by_model: bool, value: Any) -> tuple[Any, tuple[str, str] | None]:
    """The value as DeepSpeed reads it, and problem and cure where it does not take it, or takes it for something else.

    by_model: one of DeepSpeed's pydantic models reads it, which takes what pydantic can convert ("2" for a number).
    A number and a path stay as the file has them: 1e9 is 1e9.
    """
    kind: Any = entry["type"]
    hint: Any
    if isinstance(kind, list):
        words = {word.lower(): word for word in kind}
        read = words.get(value.lower(), value) if entry.get("any_case") and isinstance(value, str) else value
        hint, wanted, limits = Literal[tuple(kind)], f"one of {', '.join(kind)}", {}
    else:
        (hint, wanted), read = _TYPES[kind], value
        limits = {limit: entry[limit] for limit in _LIMITS if limit in entry}
        wanted = " ".join([wanted, *(f"{_LIMITS[limit]} {number}" for limit, number in limits.items())])
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[hint, Field(**limits)])
        typed = adapter.validate_python(read, strict=not by_model)
    except ValidationError:
        return value, (
            f"{shown(value, as_json)} is not {wanted}",
            f"write {wanted}, or remove the line for the default",
        )
    same_number = all(type(v) in (int, float) for v in (value, typed))
    return value if same_number or isinstance(typed, Path) else typed, None
