"""Names, types and limits of a ds_config's keys, as DeepSpeed's own models have them, by the table ds_keys.yaml.

The table stands in for DeepSpeed so that lint answers at once, also where DeepSpeed is not installed.
tests/unit/test_ds_keys.py holds it equal to the installed DeepSpeed, and lets both judge the same values.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from ...errors import did_you_mean, shown
from ...errors.findings import Finding
from ...errors.tables import Document, Fields, table


def key_table() -> Fields:
    """ds_keys.yaml: which keys the pinned DeepSpeed takes, which it dropped, and which the recipe owns."""
    return table(Path(__file__).with_suffix(".yaml"))


def value_at(config: object, path: str, default: object = None) -> Any:
    """The value at a dotted path, or the default where a table on the way is missing or no table."""
    for part in path.split("."):
        config = config.get(part, default) if isinstance(config, dict) else default
    return config


def leaves(config: Document, at: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each key in the table at path `at` that has no table of known keys below it."""
    for key, value in config.items():
        path = f"{at}{key}"
        if key_table()["allowed"][path].get("block"):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def as_json(value: object) -> str:
    """A value as JSON writes it, for messages."""
    return json.dumps(value, default=str)


def read_keys(config: Document, name: str, found: list[Finding], at: str = "", written: str = "") -> Fields:
    """The table at path `at`, which the file calls `written`, under first names and with typed values.

    What is wrong is left out of it and added to `found`.
    """
    known, clean = key_table(), dict[str, Any]()
    allowed, deepspeed = known["allowed"], known["deepspeed"]
    in_model = allowed.get(at.rstrip("."), {}).get("block") == "model"
    for spelling, value in config.items():
        path, here = f"{at}{spelling}", f"{written}{spelling}"

        def wrong(rule: str, here: str = here, **values: object) -> None:
            found.append(Finding.of(rule, name, here, deepspeed=deepspeed, **values))

        gone = known["removed"].get(path)
        if gone:
            since = f" (gone since {gone['since']})" if gone["since"] != "older" else ""
            wrong("ds-removed-key", **gone | {"since": since, "value": shown(value, as_json)})
            continue
        old = known["deprecated"].get(path)
        if old:
            wrong("ds-deprecated-key", use=old["use"], issue=old["issue"])
            if "type" in old and not (value is None and "values" in old):
                value, wanted = _typed(old, True, value)
                if wanted:
                    wrong("ds-wrong-value", value=shown(value, as_json), wanted=wanted)
                    continue
            value = old["values"].get(value) if "values" in old else value
            if value is None:
                continue
            path = old["now"]
        path = _first_names().get(path, path)
        parent, _, key = path.rpartition(".")
        entry = allowed.get(path)
        if entry is None:
            siblings = [k.rpartition(".")[2] for k in allowed if k.rpartition(".")[0] == parent]
            wrong("ds-unknown-key", value=shown(value, as_json), instead=did_you_mean(str(spelling), siblings))
        elif key in clean:
            wrong("ds-two-spellings", key=key)
        elif value is None and entry.get("default", "") is None:
            continue
        elif entry.get("block"):
            if isinstance(value, Mapping):
                clean[key] = read_keys(value, name, found, f"{path}.", f"{here}.")
            else:
                wrong("ds-not-a-block", value=shown(value), key=key)
        elif value == "auto":
            # It means something to Transformers, to Brigade, or to DeepSpeed itself.
            if path in known["owned_by_recipe"] or entry.get("auto") or entry.get("default") == "auto":
                clean[key] = value
            else:
                wrong("ds-auto-not-filled", default=json.dumps(entry.get("default")))
        elif "type" not in entry:
            clean[key] = value
        else:
            typed, wanted = _typed(entry, in_model, value)
            if wanted:
                wrong("ds-wrong-value", value=shown(value, as_json), wanted=wanted)
            else:
                clean[key] = typed
    return clean


@functools.cache
def _first_names() -> dict[str, str]:
    """Paths with a key's second spelling to those with its first."""
    allowed = key_table()["allowed"].items()
    return {f"{path.rpartition('.')[0]}.{entry['also']}": path for path, entry in allowed if "also" in entry}


def _but(refused: type) -> BeforeValidator:
    """A validator that takes no `refused`."""

    def check(value: object) -> object:
        if isinstance(value, refused):
            raise ValueError(refused.__name__)
        return value

    return BeforeValidator(check)


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
    "strings": (
        Annotated[list[str], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)],
        "a list of names",
    ),
    "interval": (Annotated[int, _but(str)], '"auto" or a whole number'),
}
_LIMITS = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}


def _typed(entry: Document, in_model: bool, value: object) -> tuple[object, str]:
    """The value as DeepSpeed reads it, and "", or what it should be where DeepSpeed does not take it.

    in_model: one of DeepSpeed's pydantic models reads it, which takes what pydantic can convert ("2" for a number).
    A number and a path stay as the file has them: 1e9 is 1e9.
    """
    kind, limits, read = entry["type"], {limit: entry[limit] for limit in _LIMITS if limit in entry}, value
    hint: Any
    if isinstance(kind, list):
        hint, wanted = Literal[tuple(kind)], f"one of {', '.join(kind)}"
        if entry.get("any_case") and isinstance(value, str):
            read = next((word for word in kind if word.lower() == value.lower()), value)
    else:
        hint, wanted = _TYPES[kind]
        wanted = " ".join([wanted, *(f"{_LIMITS[limit]} {number}" for limit, number in limits.items())])
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[hint, Field(**limits)])
        typed = adapter.validate_python(read, strict=not in_model)
    except ValidationError:
        return value, wanted
    same_number = all(type(v) in (int, float) for v in (value, typed))
    return value if same_number or isinstance(typed, Path) else typed, ""
