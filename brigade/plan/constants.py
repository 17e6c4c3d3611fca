"""The numbers that formulas take from measurements, published runs and other programs, and what engines, losses and optimizers
keep and send: constants.yaml and costs/conventions.yaml explain them and name their sources."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

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


@dataclass(frozen=True)
class Engine:
    """One of conventions.yaml's engines."""

    weights: float
    gradients: float
    optimizer: float
    held: bool = True
    accumulated: float = 8.0
    reduced: float = 4.0
    gathered: float = 2.0
    bucket: float = 0.0
    hidden: float = 1.0
    everywhere: bool = False
    host_sharded: float = 1.0
    host_rank: float = 0.0
    host_norm: float = math.inf
    collectives: int = 1
    scatters_hidden: bool = True


class Schedule(NamedTuple):
    """One of conventions.yaml's orders of a pipeline's micro-batches."""

    bubble: float
    keeps_all: bool = False


class Rows(NamedTuple):
    """One of conventions.yaml's kinds of rows that an objective reads."""

    samples: int
    mismatched: int


_ROWS = table(Path(__file__).parent / "costs/conventions.yaml")
ENGINES = {name: Engine(**row) for name, row in _ROWS["engines"].items()}
SCHEDULES = {name: Schedule(**row) for name, row in _ROWS["schedules"].items()}
ROWS = {name: Rows(**row) for name, row in _ROWS["rows"].items()}
LOGIT_BYTES: dict[str, float] = dict(_ROWS["logit_bytes"])
DRIVERS: dict[str, float] = dict(_ROWS["drivers"])
