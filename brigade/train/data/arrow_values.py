"""Values of rows, as JSON gives them: what an Arrow schema calls JSON is decoded, and keys that Arrow has added are left out."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors.tables import Fields

if TYPE_CHECKING:
    import pyarrow

Read = Callable[[Any], Any]
HUGGINGFACE = b"huggingface"  # key of a schema's metadata: the features of the datasets library, as JSON


def _with_single_keys(pairs: list[tuple[str, object]]) -> Fields:
    """Return an object of JSON. Raises ValueError for a key that stands there twice and says different things."""
    made = dict(pairs)
    if len(made) < len(pairs):
        for key, value in pairs:
            if made[key] != value:
                raise ValueError(f"the key {key!r} twice in one object")
    return made


def json_or(otherwise: object, text: str | bytes) -> Any:
    """Return the value of a JSON text, or `otherwise` where the text is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return otherwise


DECODER = json.JSONDecoder(object_pairs_hook=_with_single_keys)  # of rows, and of JSON that stands in their texts


def reader_of(schema: "pyarrow.Schema") -> Callable[[Fields], Fields]:
    """Return what reads a row of a table, as to_pylist(maps_as_pydicts="strict") gives it. It raises ValueError for JSON that
    cannot be read.

    Columns and keys inside others that are JSON by Arrow's type (which Parquet's logical type becomes) or by the features of the
    datasets library (Json) are decoded; a null within them is meant. Structs lose the keys that are null elsewhere, for Arrow
    gives each the keys of all others. A class (ClassLabel) is its name: numbers follow the order of names, and 1 may mean "bad".
    """
    features = _features(schema)
    readers = {field.name: _reader(field.type, _inner(features, field.name)) for field in schema}
    needed = {name: read for name, read in readers.items() if read is not None}

    def read_row(row: Fields) -> Fields:
        for name, read in needed.items():
            try:
                row[name] = None if row[name] is None else read(row[name])
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"column {name!r} is JSON by its table's schema, and is not: {str(error)[:80]}"
                ) from None
        return row

    return read_row


def _features(schema: "pyarrow.Schema") -> object:
    with suppress(ValueError, KeyError, TypeError):
        return json.loads((schema.metadata or {}).get(HUGGINGFACE, b"{}"))["info"]["features"]
    return None


def _inner(feature: object, key: str) -> object:
    return feature.get(key) if isinstance(feature, dict) else None


def _reader(kind: "pyarrow.DataType", feature: object) -> Read | None:
    """Return what reads the values of an Arrow type; None where they are right as they are. feature: of datasets, where known"""
    from pyarrow import types

    if str(getattr(kind, "extension_name", "")) == "arrow.json" or _inner(feature, "_type") == "Json":
        return _decode
    names = _inner(feature, "names")
    if _inner(feature, "_type") == "ClassLabel" and isinstance(names, list):
        return lambda value: names[value] if 0 <= value < len(names) else None  # -1: nobody has given it a class
    if isinstance(feature, dict) and isinstance(feature.get("_type"), str):
        feature = feature.get("feature")  # of a list
        if types.is_struct(kind) and isinstance(feature, dict):  # a sequence of objects, stored as an object of lists
            feature = {key: [inner] for key, inner in feature.items()}
    elif isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    if types.is_struct(kind):
        inner = {field.name: _reader(field.type, _inner(feature, field.name)) for field in kind}
        return lambda value: _struct(value, inner)
    if types.is_map(kind):
        item = _reader(kind.item_type, None)
        return lambda value: _struct(value, dict.fromkeys(value, item))
    if hasattr(kind, "value_type") and not types.is_dictionary(kind):
        element = _reader(kind.value_type, feature)
        return None if element is None else (lambda value: [item if item is None else element(item) for item in value])
    return None


def _decode(value: object) -> object:
    text = value.decode() if isinstance(value, bytes) else value
    return DECODER.decode(text) if isinstance(text, str) else text


def _struct(value: Fields, inner: dict[str, Read | None]) -> Fields:
    present = ((key, content, inner[key]) for key, content in value.items() if content is not None)
    return {key: read(content) if read else content for key, content, read in present}
