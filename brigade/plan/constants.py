"""The numbers that formulas take from measurements, published runs and other programs: constants.yaml says where each is from."""

from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from types import MappingProxyType

from ..errors.tables import Document, Fields, table


class Constants:
    """The values of constants.yaml, whose rows say what each is, in which unit, from whom and since when: most are one number."""

    product_tile: tuple[int, int]
    rule_chunk: int
    chunk_products: int
    flash_half_length: Mapping[str, float]
    exponential_width: Mapping[str, float]
    replica_width: Mapping[str, float]
    replica_kept: Mapping[str, float]
    replica_every: tuple[int, ...]

    def __getattr__(self, name: str) -> float:
        raise AttributeError(f"constants.yaml has no {name!r}")


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return MappingProxyType(value)
    return tuple(value) if isinstance(value, list) else value


SOURCES: Mapping[str, Document] = MappingProxyType(table(Path(__file__).with_name("constants.yaml")))
_VALUES: Fields = {name: _frozen(row["value"]) for name, row in SOURCES.items()}
CONSTANTS: Constants = make_dataclass("Values", _VALUES, bases=(Constants,), frozen=True)(**_VALUES)
